# title: packets and grant operations a MiB, guest to guest and to dom0: MTU 1500, 16436 with scatter-gather, TSO; serve and xen-netback
# set: all
# machine: xen-netback
# limit: 400
# hypervisor: debug
# driver: netfront

. /vm/xen/perf.sh
. /vm/xen/staging.sh

SIZE=16

# setup NAME SETUP: how the guest sends. The receiver is ready for all three. TCP makes the super-packets of a slow stream
# smaller, so that a busy computer would change their number; they have at least 32 segments here.
setup() {
    case $2 in
        mtu1500) on $1 'ip link set eth0 mtu 1500 && ethtool -K eth0 tso off gso off sg off' ;;
        mtu16436-sg) on $1 'ethtool -K eth0 sg on tso off gso off && ip link set eth0 mtu 16436' ;;
        tso) on $1 'ip link set eth0 mtu 1500 && ethtool -K eth0 sg on gso on tso on &&
            echo 32 >/proc/sys/net/ipv4/tcp_min_tso_segs' ;;
    esac
}

# large NAME: the rest of its way takes packets of 16436 bytes, too.
large() {
    [ ! -e /sys/class/net/vif$(domain $1).0 ] || ip link set vif$(domain $1).0 mtu 16436
}

# packets NAME: those on the rings of a guest, as the backend counts them.
packets() {
    case $BACKEND_NAME in
        netback) passed vif$(domain $1).0 ;;
        *) frames $1 ;;
    esac
}

cpu_of() {
    xl list | awk -v guests=$1 'NR > 1 && ($1 != "Domain-0") == guests { sum += $6 } END { print sum + 0 }'
}

# ours NAME: a counter of the daemon, summed over its ports.
ours() {
    [ $BACKEND_NAME = netback ] || disk_counter $1
}

# sent SETUP TO ADDRESS: 1 check. What a stream from guest one costs; in PACKETS, OPERATIONS, SEGMENTS and CHECKSUMS.
sent() {
    local name=$BACKEND_NAME-$1 dom0 guests served
    PACKETS=$(packets one) SEGMENTS=$(ours segments_made) CHECKSUMS=$(ours checksums_computed)
    dom0=$(cpu_of 0) guests=$(cpu_of 1) served=$(daemon)
    counting
    transfer "$name, guest to $2" one $2 $3 $SIZE
    count
    served=$(daemon_since "$served")
    dom0=$(milliseconds "$(cpu_of 0) - $dom0") guests=$(milliseconds "$(cpu_of 1) - $guests")
    PACKETS=$(($(packets one) - PACKETS))
    [ $2 = dom0 ] || set -- $1 guest
    name="gso guest-$2 $name MiB $SIZE packets=$PACKETS dom0_ms=$dom0 guests_ms=$guests"
    if [ $BACKEND_NAME != netback ]; then
        SEGMENTS=$(($(ours segments_made) - SEGMENTS)) CHECKSUMS=$(($(ours checksums_computed) - CHECKSUMS))
        name="$name segments=$SEGMENTS checksums=$CHECKSUMS"
    fi
    note "$name $COUNTS $served"
    row $name $COUNTS $served
}

# setups TO ADDRESS: 6 checks, and 1 if ours is the backend.
setups() {
    local small
    for each in mtu1500 mtu16436-sg tso; do
        check "$BACKEND_NAME, guest to $1: $each" setup one $each
        sent $each $1 $2
        [ $each != mtu1500 ] || small=$PACKETS
    done
    check "$BACKEND_NAME: TSO makes at least five times fewer packets ($small, $PACKETS)" test $((5 * PACKETS)) -lt $small
    [ $BACKEND_NAME = netback ] ||
        is "$BACKEND_NAME: no segment is made and no checksum computed" "$SEGMENTS $CHECKSUMS" '0 0'
}

# pair NAME [MORE]: 4 checks. Two guests of this backend.
pair() {
    BACKEND_NAME=$1
    networked2 one 11 "${2:-}"
    networked2 two 12 "${2:-}"
    large one
    large two
    ip link set xenbr0 mtu 16436
    on two 'ip link set eth0 mtu 16436'
}

networked2() {
    check "guest $1 is created" guest $1 "$(vif $2 "$3")" || give_up 'without a guest there is nothing to see'
    check "$1 has a network" ready_with_address $1 $2 || give_up 'without a network there is nothing to see'
}

use_ringfence
stream_sum $SIZE
guests_with tools driver
EXTRA=driver=xen-netfront
pair serve
setups dom0 $ADDRESS
setups two 10.77.0.12
gone one
gone two

check 'staging: configured' reload '[network]' 'mode = "staging"'
EXTRA=
pair staging
setups dom0 $ADDRESS
is 'staging: no grant operation' $OPERATIONS 0
setups two 10.77.0.12
is 'staging: nor from guest to guest' $OPERATIONS 0
gone one
gone two

kill $SERVE
wait $SERVE
configure '[network]' 'attach = "switch"' 'host-interface = "rf-host"'
check 'switch: ringfence serve is ready' serve
check 'dom0 has its leg on the switch' ip link set rf-host master xenbr0 up
EXTRA=driver=xen-netfront
pair switch mtu=16436
setups two 10.77.0.12
gone one
gone two

kill $SERVE
wait $SERVE
modprobe xen-netback
SCRIPT=vif-control
pair netback
setups dom0 $ADDRESS
setups two 10.77.0.12
gone one
gone two
complete
