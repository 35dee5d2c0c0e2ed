#!/bin/sh
# Host of a machine whose network card is on `ringfence passt`: passt-host.sh TRANSPORT RINGFENCE TRAFFIC SHARE QEMU ARGUMENT...
#
# TRANSPORT is `stream`, `vhost-user` (the arguments of QEMU share the machine's memory), `lent-pool` (they share a pool, and
# nothing else), or `debian` (a stream to the passt of the PATH, for comparison).
#
# The host runs on this computer, in user, network and mount namespaces of its own, so nothing leaves them. Servers are at the
# loopback, to which two addresses lead. What they received is in the folder SHARE. Everything ends with QEMU.
set -eu
transport=$1 ringfence=$2 traffic=$3 share=$4
shift 4
here=$(dirname "$0")

. "$here/host.sh"
. "$here/../lib/host-network.sh"
host_network
mount -t tmpfs passt /dev/shm

loopback_servers
serve_orders

start() { "$@" --one-off --socket /dev/shm/passt.socket --pid /dev/shm/passt.pid --log-file "$share/uplink.log" -t 8080:7002 -S test; }
loopback='--map-host-loopback 192.0.2.80 --map-host-loopback 2001:db8:1::80'
case $transport in
    stream) start "$ringfence" passt --debug -D 127.0.0.1 $loopback ;;
    vhost-user) start "$ringfence" passt --vhost-user --debug -D 127.0.0.1 $loopback ;;
    lent-pool)
        start "$ringfence" passt --vhost-user --require-pool 64M --debug -D 127.0.0.1 $loopback
        ;;
    debian)
        passt --version | head -n 1 >&2
        # Debian's passt does not translate 127.0.0.1, which is then the machine's own loopback. The gateway leads to the host's.
        start passt -D 192.0.2.1
        ;;
esac
card=virtio-net-pci,netdev=card,mac=52:54:00:12:34:56
if [ $transport = lent-pool ]; then
    card=$card,iommu_platform=on,disable-legacy=on,addr=0x11
    truncate -s 64M /dev/shm/disk.img /dev/shm/foreign.img /dev/shm/plugged.img
    keep disk "$ringfence" vhost-user blk --socket /dev/shm/disk.socket --disk /dev/shm/disk.img --require-pool 64M
    keep plugged "$ringfence" vhost-user blk --socket /dev/shm/plugged.socket --disk /dev/shm/plugged.img --require-pool 64M
    keep_storage_daemon foreign
    keep proxy "$ringfence" pool-proxy --listen /dev/shm/foreign.socket --backend /dev/shm/foreign.backend --pool 64M
    wait_for_files /dev/shm/disk.socket /dev/shm/foreign.socket /dev/shm/foreign.backend
    # The firmware knows no pool, so it must not look for a system there.
    # shellcheck disable=SC2046
    set -- "$@" $(slot) -boot strict=on -chardev socket,id=disk,path=/dev/shm/disk.socket,$RECONNECT \
        -device vhost-user-blk-pci,chardev=disk,num-queues=2,iommu_platform=on,disable-legacy=on,addr=0x12,vectors=0 \
        -chardev socket,id=foreign,path=/dev/shm/foreign.socket,$RECONNECT \
        -device vhost-user-blk-pci,chardev=foreign,num-queues=1,iommu_platform=on,disable-legacy=on,addr=0x13,vectors=0
elif [ $transport != vhost-user ]; then
    exec "$@" -netdev stream,id=card,server=off,addr.type=unix,addr.path=/dev/shm/passt.socket -device $card
fi
# QEMU 7.2 crashes with MSI-X under emulation.
exec "$@" -chardev socket,id=passt,path=/dev/shm/passt.socket -netdev vhost-user,id=card,chardev=passt \
    -device $card,vectors=0
