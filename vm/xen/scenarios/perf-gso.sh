# title: packets and grant operations a MiB, guest to guest and to dom0: MTU 1500, 16436 with scatter-gather, TSO; serve and xen-netback
# set: all
# machine: xen-netback
# limit: 400
# hypervisor: debug
# driver: netfront

. /vm/xen/perf.sh
. /vm/xen/staging.sh

SIZE=16

# configure_sender NAME SETUP: configures the offloads and MTU of a sender; the receiver can take all three.
# Super-packets have at least 32 segments, because TCP makes those of a slow stream smaller and their number would
# depend on the computer's load.
configure_sender() {
    case $2 in
        mtu1500) on $1 'ip link set eth0 mtu 1500 && ethtool -K eth0 tso off gso off sg off' ;;
        mtu16436-sg) on $1 'ethtool -K eth0 sg on tso off gso off && ip link set eth0 mtu 16436' ;;
        tso) on $1 'ip link set eth0 mtu 1500 && ethtool -K eth0 sg on gso on tso on &&
            echo 32 >/proc/sys/net/ipv4/tcp_min_tso_segs' ;;
    esac
}

# raise_mtu NAME: lets dom0's end of the interface take packets of 16436 bytes.
raise_mtu() {
    [ ! -e /sys/class/net/vif$(domain_id $1).0 ] || ip link set vif$(domain_id $1).0 mtu 16436
}

# ring_packets NAME: prints the number of packets on the rings of a guest, as the backend counts them.
ring_packets() {
    case $BACKEND_NAME in
        netback) interface_frames vif$(domain_id $1).0 ;;
        *) vif_frames $1 ;;
    esac
}

cpu_seconds_of() {
    xl list | awk -v guests=$1 'NR > 1 && ($1 != "Domain-0") == guests { sum += $6 } END { print sum + 0 }'
}

# port_counter NAME: prints the sum of a counter over the daemon's ports.
port_counter() {
    [ $BACKEND_NAME = netback ] || daemon_counter $1
}

# measure_stream SETUP TO ADDRESS: checks a stream from guest one, and writes a row of its cost. Sets PACKETS,
# OPERATIONS, SEGMENTS and CHECKSUMS.
measure_stream() {
    local name=$BACKEND_NAME-$1 dom0 guests served
    PACKETS=$(ring_packets one) SEGMENTS=$(port_counter segments_made) CHECKSUMS=$(port_counter checksums_computed)
    dom0=$(cpu_seconds_of 0) guests=$(cpu_seconds_of 1) served=$(daemon_counters)
    reset_hypervisor_counters
    check_transfer "$name, guest to $2" one $2 $3 $SIZE
    read_hypervisor_counters
    served=$(daemon_counters_since "$served")
    dom0=$(milliseconds "$(cpu_seconds_of 0) - $dom0") guests=$(milliseconds "$(cpu_seconds_of 1) - $guests")
    PACKETS=$(($(ring_packets one) - PACKETS))
    [ $2 = dom0 ] || set -- $1 guest
    name="gso guest-$2 $name MiB $SIZE packets=$PACKETS dom0_ms=$dom0 guests_ms=$guests"
    if [ $BACKEND_NAME != netback ]; then
        SEGMENTS=$(($(port_counter segments_made) - SEGMENTS)) CHECKSUMS=$(($(port_counter checksums_computed) - CHECKSUMS))
        name="$name segments=$SEGMENTS checksums=$CHECKSUMS"
    fi
    note "$name $COUNTS $served"
    write_row $name $COUNTS $served
}

# measure_setups TO ADDRESS: measures streams of each setup, and compares their numbers of packets.
measure_setups() {
    local small
    for each in mtu1500 mtu16436-sg tso; do
        check "$BACKEND_NAME, guest to $1: $each" configure_sender one $each
        measure_stream $each $1 $2
        [ $each != mtu1500 ] || small=$PACKETS
    done
    check "$BACKEND_NAME: TSO makes at least five times fewer packets ($small, $PACKETS)" test $((5 * PACKETS)) -lt $small
    [ $BACKEND_NAME = netback ] ||
        is "$BACKEND_NAME: no segment is made and no checksum computed" "$SEGMENTS $CHECKSUMS" '0 0'
}

# create_pair NAME [MORE]: checks that two guests of this backend start. Sets BACKEND_NAME.
create_pair() {
    BACKEND_NAME=$1
    create_networked_guest_with one 11 "${2:-}"
    create_networked_guest_with two 12 "${2:-}"
    raise_mtu one
    raise_mtu two
    ip link set xenbr0 mtu 16436
    on two 'ip link set eth0 mtu 16436'
}

create_networked_guest_with() {
    check "guest $1 is created" create_guest $1 "$(vif_line $2 "$3")" || give_up 'without a guest there is nothing to see'
    check "$1 has a network" start_network $1 $2 || give_up 'without a network there is nothing to see'
}

use_ringfence
stream_sum $SIZE
guests_with tools driver
EXTRA=driver=xen-netfront
create_pair serve
measure_setups dom0 $ADDRESS
measure_setups two 10.77.0.12
check_destruction one
check_destruction two

check 'staging: configured' reload_daemon '[network]' 'mode = "staging"'
EXTRA=
create_pair staging
measure_setups dom0 $ADDRESS
is 'staging: no grant operation' $OPERATIONS 0
measure_setups two 10.77.0.12
is 'staging: nor from guest to guest' $OPERATIONS 0
check_destruction one
check_destruction two

kill $SERVE
wait $SERVE
write_configuration '[network]' 'attach = "switch"' 'host-interface = "rf-host"'
check 'switch: ringfence serve is ready' start_daemon
check 'dom0 has its leg on the switch' ip link set rf-host master xenbr0 up
EXTRA=driver=xen-netfront
create_pair switch mtu=16436
measure_setups two 10.77.0.12
check_destruction one
check_destruction two

kill $SERVE
wait $SERVE
modprobe xen-netback
SCRIPT=vif-control
create_pair netback
measure_setups dom0 $ADDRESS
measure_setups two 10.77.0.12
check_destruction one
check_destruction two
complete_scenario
