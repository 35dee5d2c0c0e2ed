#!/bin/sh
# Host of a machine with devices of `ringfence vhost-user net`, or behind `ringfence shield`:
# devices-host.sh DEVICES RINGFENCE TRAFFIC SHARE QEMU ARGUMENT...
#
# | DEVICES | the machine has |
# |---|---|
# | `net` | a card on a switch with the guest `peer` of `ringfence run`, and one on the network of the host |
# | `net-pool` | the same with a pool, and private memory |
# | `net-shield` | the same as `net`, each card behind a shield |
# | `foreign-net` | cards behind a shield of passt and of testpmd, and one of each without a shield |
# | `foreign-pool` | cards of both behind `ringfence pool-proxy`, and private memory |
# | `migration` | a disk behind a shield, and migrates to another QEMU, whose disk is behind another shield (migrate.py) |
# | `shield` | three disks: behind a shield, of qemu-storage-daemon and of Ringfence; of qemu-storage-daemon without a shield; behind a shield a fourth one that can be plugged in |
#
# The host runs on this computer, in user, network and mount namespaces of its own, so nothing leaves them. Each of its
# processes is started again whenever it ends. Everything ends with QEMU.
set -eu
devices=$1 ringfence=$2 traffic=$3 share=$4
shift 4
here=$(dirname "$0")
. "$here/host.sh"
. "$here/../lib/host-network.sh"
mount -t tmpfs shm /dev/shm
# The switch is one of these namespaces.
mount -t tmpfs run /run
unset XDG_RUNTIME_DIR
PATH=$(dirname "$traffic"):$PATH
serve_orders

# card NAME OPTIONS: prints QEMU's options for a card on the socket of that name. QEMU 7.2 crashes with MSI-X under emulation.
card() {
    echo "-chardev socket,id=$1,path=/dev/shm/$1.socket,$RECONNECT -netdev vhost-user,id=$1,chardev=$1"
    echo "-device virtio-net-pci,netdev=$1,disable-legacy=on,romfile=,vectors=0,$2"
}

# disk NAME ADDRESS: prints QEMU's options for a disk on the socket of that name.
disk() {
    echo "-chardev socket,id=$1,path=/dev/shm/$1,$RECONNECT"
    echo "-device vhost-user-blk-pci,chardev=$1,num-queues=1,vectors=0,addr=$2"
}

# shield NAME: keeps a shield between the sockets NAME.socket and NAME.backend.
shield() {
    keep "$1-shield" "$ringfence" shield --listen "/dev/shm/$1.socket" --backend "/dev/shm/$1.backend" --reconnect
}

# foreign_passt NAME SOCKET [OPTION...]: keeps the passt of the PATH at a socket.
foreign_passt() {
    local name=$1 socket=$2
    shift 2
    # It does not translate 127.0.0.1, which is then the machine's own loopback. The gateway leads to the host's.
    keep "$name" passt --foreground --vhost-user --socket "/dev/shm/$socket" -D 192.0.2.1 -S test "$@"
}

# testpmd NAME SOCKET ADDRESS: keeps a testpmd that forwards between a socket and a TAP with that address.
testpmd() {
    keep "$1" dpdk-testpmd --lcores 0@0,1@0 --no-huge -m 128 --no-pci --no-shconf --no-telemetry --iova-mode=va \
        --vdev "net_vhost0,iface=/dev/shm/$2,queues=1" --vdev "net_tap0,iface=$1" -- \
        --forward-mode=io --nb-cores=1 --total-num-mbufs=16384 --disable-link-check --stats-period=86400
    until ip address add "$3" dev "$1" 2>/dev/null; do sleep 0.1; done
    ip link set "$1" up
}

case $devices in
    net | net-pool | net-shield)
        options= own= backend=socket
        case $devices in
            net-pool) options='--require-pool 64M' own=iommu_platform=on, ;;
            net-shield) options='--require-pool 64M' backend=backend ;;
        esac
        # The network outside of the host, with servers.
        beside unshare --net sleep infinity
        outside=$!
        until [ "$(readlink /proc/$outside/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
        host_network $outside
        head -c 4M /dev/urandom >"$share/noise"
        beside nsenter -t $outside -n sh -c '
            ip address add 198.51.100.1/32 dev lo && ip link set lo up
            ip address add 192.0.2.1/24 dev out0 && ip link set out0 up
            exec traffic echo 7003
        '
        beside nsenter -t $outside -n python3 -m http.server --directory "$share" 80 >"$share/http.log" 2>&1
        # Words on purpose.
        # shellcheck disable=SC2086
        {
            keep card "$ringfence" vhost-user net --socket /dev/shm/card.$backend --switch lab --address 10.77.0.2/24 --mtu 9000 $options
            keep uplink "$ringfence" vhost-user net --socket /dev/shm/uplink.$backend --uplink $options
        }
        if [ $devices = net-shield ]; then
            wait_for_files /dev/shm/card.backend /dev/shm/uplink.backend
            shield card
            shield uplink
        fi
        wait_for_files /dev/shm/card.socket /dev/shm/uplink.socket
        keep peer "$ringfence" run --switch lab --uplink none --name peer --address 10.77.0.3/24 --mtu 9000 -- \
            sh -c 'traffic echo 7003 & traffic return 7005 & while :; do traffic receive 7004; done'
        # shellcheck disable=SC2046
        set -- "$@" $(card card ${own}mac=52:54:00:12:34:56,addr=0x11) $(card uplink ${own}addr=0x12)
        ;;
    foreign-net | foreign-pool)
        case $(passt --help 2>&1) in
            *--vhost-user*) passt --version | head -n 1 >&2 ;;
            *) echo 'this passt has no vhost-user: use `--qemu trixie-backports`' >&2 && exit 1 ;;
        esac
        host_network
        loopback_servers
        foreign_passt passt passt.backend -t 8080:7002
        testpmd testpmd testpmd.backend 10.79.0.1/24
        wait_for_files /dev/shm/passt.backend /dev/shm/testpmd.backend
        # testpmd computes no checksums, and leaves super-packets as they are.
        plain=csum=off,guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off
        own=
        for each in passt testpmd; do
            case $devices in
                foreign-net) shield $each ;;
                foreign-pool)
                    own=iommu_platform=on,
                    keep $each-proxy "$ringfence" pool-proxy --listen /dev/shm/$each.socket --backend /dev/shm/$each.backend \
                        --pool 64M
                    ;;
            esac
            wait_for_files /dev/shm/$each.socket
        done
        # shellcheck disable=SC2046
        set -- "$@" $(card passt ${own}addr=0x11) $(card testpmd $own$plain,addr=0x12)
        if [ $devices = foreign-net ]; then
            foreign_passt passt-direct passt-direct.socket
            testpmd testpmd-direct testpmd-direct.socket 10.80.0.1/24
            wait_for_files /dev/shm/passt-direct.socket /dev/shm/testpmd-direct.socket
            # shellcheck disable=SC2046
            set -- "$@" $(card passt-direct addr=0x13) $(card testpmd-direct $plain,addr=0x14)
        fi
        ;;
    migration)
        truncate -s 64M /dev/shm/source.img
        ln /dev/shm/source.img /dev/shm/target.img
        for each in source target; do
            # The machine runs on one side at a time, and so does what writes to the image.
            keep_storage_daemon $each locking=off
            wait_for_files /dev/shm/$each.backend
            shield $each
        done
        wait_for_files /dev/shm/source.socket /dev/shm/target.socket
        set -- python3 -B "$here/migrate.py" /dev/shm "$@"
        ;;
    shield)
        truncate -s 64M /dev/shm/foreign.img /dev/shm/own.img /dev/shm/direct.img /dev/shm/plugged.img
        python3 "$here/firmware.py" /dev/shm/firmware.img
        for each in foreign direct firmware plugged; do
            keep_storage_daemon $each
        done
        keep own "$ringfence" vhost-user blk --socket /dev/shm/own.backend --disk /dev/shm/own.img --require-pool 64M
        for each in foreign own firmware plugged; do
            wait_for_files /dev/shm/$each.backend
            shield $each
        done
        wait_for_files /dev/shm/foreign.socket /dev/shm/own.socket /dev/shm/firmware.socket /dev/shm/direct.backend
        # The machine can reboot.
        # shellcheck disable=SC2046
        set -- "$@" -action reboot=reset $(disk foreign.socket 0x12) $(disk own.socket 0x13) $(disk direct.backend 0x14) \
            $(slot)
        ;;
esac
exec "$@"
