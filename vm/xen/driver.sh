# Helpers for scenarios with our driver in the guest (`linux/netfront`).

DRIVER=ringfence-netfront

# create_guest_with_our_driver NAME N: checks that a guest with the part `driver` starts, and that our driver has its
# interface.
create_guest_with_our_driver() {
    create_networked_guest $1 $2
    check "$1 uses our driver" uses_driver $1 $DRIVER
}

# uses_driver NAME DRIVER: succeeds if the guest's interface has this driver.
uses_driver() {
    on $1 "readlink /sys/class/net/eth0/device/driver | grep '/$2\$'"
}

# change_binding NAME FROM TO: unbinds the guest's interface from one driver, and binds it to another or the same.
change_binding() {
    on $1 "echo vif-0 >/sys/bus/xen/drivers/$2/unbind && echo vif-0 >/sys/bus/xen/drivers/$3/bind"
}

# check_driver_rebinding NAME N TIMES PEER: checks that our driver can be unbound in the middle of traffic with the
# domain PEER, and bound again.
check_driver_rebinding() {
    local name=$1 number=$2 times=$3 peer=$4 round=0
    on $name "traffic echo 7000 >/dev/null 2>&1 &"
    while [ $round -lt $times ]; do
        round=$((round + 1))
        on $peer "wait_for 10 traffic pulse 10.77.0.$number 7000 1"
        on $peer "{ traffic pulse 10.77.0.$number 7000 60 >/dev/null 2>&1 & }"
        check "$name: our driver unbound and bound, round $round" change_driver $name $number $DRIVER $DRIVER ||
            note "$(interface_state $name)"
        on $peer 'killall traffic'
    done
    on $name 'killall traffic'
}

# change_driver NAME N FROM TO: changes the binding, and configures the network again.
change_driver() {
    change_binding $1 $3 $4 && configure_network $1 $2
}

# interface_state NAME: prints both ends of the guest's interface in the store, its packets, the rings of xen-netback,
# and the event channels of dom0 to the guest.
interface_state() {
    local number=$(domain_id $1)
    xenstore-ls $(read_key /local/domain/$number/device/vif/0/backend)
    xenstore-ls /local/domain/$number/device/vif/0
    cat /sys/class/net/vif$number.0/statistics/[rt]x_packets
    ip neigh
    mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null
    tail -n +1 /sys/kernel/debug/xen-netback/vif$number.0/io_ring_q* 2>/dev/null
    grep vif$number.0 /proc/interrupts
    event_channels $number
    dmesg | tail -n 5
    on $1 'ip neigh; ethtool -S eth0; grep eth0 /proc/interrupts; dmesg | tail -n 5'
}

# event_channels DOMAIN: prints the event channels of dom0 to a domain, as `PORT [PENDING/MASKED/...]` of the
# hypervisor's debug key `e`.
event_channels() {
    xl dmesg -c >/dev/null
    xl debug-keys e
    xl dmesg | awk -v to=" d=$1 " '/information for domain/ { ours = /domain 0:/ } ours && index($0, to)'
}

# check_transfers_during LABEL NAME N PEER MEBIBYTES COMMAND...: checks that transfers between the domain PEER and the
# guest, one each way, succeed while the command runs in dom0.
check_transfers_during() {
    local label=$1 name=$2 number=$3 peer=$4 size=$5
    shift 5
    PORT=$((${PORT:-5000} + 2))
    on $name "start_receiver $PORT"
    on $peer "start_receiver $((PORT + 1))"
    on $peer "{ traffic send 10.77.0.$number $PORT $size >/tmp/sent.$PORT 2>&1 & }"
    on $name "{ traffic send $ADDRESS $((PORT + 1)) $size >/tmp/sending 2>&1 & }"
    # A sender whose connection is not made before the link goes down can give up before it is back.
    on $name "wait_for 10 stream_has_begun $PORT" && on $peer "wait_for 10 stream_has_begun $((PORT + 1))"
    "$@" || note "$label: \`$*\` ended with status $?"
    is "$label: $peer to $name" "$(late_stream $name $PORT)" "$(stream_sum $size)"
    is "$label: $name to $peer" "$(late_stream $peer $((PORT + 1)))" "$(stream_sum $size)"
}

# late_stream NAME PORT: prints the length and the SHA-256 of a stream that may still be on its way.
late_stream() {
    ON_LIMIT=150 on $1 "wait_for 120 test -e /tmp/received.$2; received_stream $2"
}

# start_datagram_return NAME: starts a server in the guest that returns each datagram to port 7100.
start_datagram_return() {
    on $1 '{ traffic return 7100 >/dev/null 2>&1; } & wait_for 10 grep -q :1BBC /proc/net/udp /proc/net/udp6'
}

# driver_counter NAME PATTERN: prints the sum of our driver's counters whose names match.
driver_counter() {
    on $1 "ethtool -S eth0" | awk -v name="^$2:\$" '$1 ~ name { sum += $2 } END { print sum + 0 }'
}

# driver_counter_difference NAME PATTERN OTHER: prints the sum of the first counters less that of the others, read at
# once.
driver_counter_difference() {
    on $1 "ethtool -S eth0" | awk -v name="^$2:\$" -v other="^$3:\$" '$1 ~ name { sum += $2 } $1 ~ other { sum -= $2 } END { print sum + 0 }'
}

# create_guest_of_driver_domain NAME N: checks that a PVH guest with the part `driver` starts, whose interface the
# driver domain `net` serves, and that our driver has it.
create_guest_of_driver_domain() {
    SCRIPT=vif-ringfence
    check "guest $1 is created" create_guest $1 'type="pvh"' "$(vif_line $2 backend=net)"
    check "$1 takes commands" guest_ready $1 || give_up 'nothing to see'
    check "the hotplug script of the interface of $1 runs" run_hotplug_script vif $1 0
    check "$1 has a network" configure_network $1 $2 || note "$(on net 'tail -n 5 /tmp/serve.log') $(interface_state $1)"
    check "$1 uses our driver" uses_driver $1 $DRIVER
}

# driver_logged NAME TEXT: succeeds if the guest's driver logged a line with this text.
driver_logged() {
    on $1 "dmesg | grep -F '$2'"
}

# has_queues NAME COUNT: waits until the guest's interface has that many queues, and dom0 or the driver domain
# answers.
has_queues() {
    on $1 "wait_for 20 sh -c 'ethtool -l eth0 | tail -n 2 | grep -q \"Combined:.$2\$\"'" &&
        on $1 "wait_for 20 ping -c 1 -W 1 $ADDRESS"
}

# check_kernel_log NAME: checks that the guest's kernel logged no fault. A kernel with kmemleak must also have found
# no leak of our driver: its second scan reports memory that is older than five seconds and has no reference.
check_kernel_log() {
    local complaints
    complaints=$(ON_LIMIT=90 on $1 "mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null;
        leaks=/sys/kernel/debug/kmemleak;
        [ ! -e \$leaks ] || { echo scan >\$leaks; sleep 6; echo scan >\$leaks; };
        { dmesg; cat \$leaks 2>/dev/null; } |
            grep -E 'BUG|WARNING|Oops|Call Trace|general protection|broke the protocol|ringfence_netfront\]|suspicious RCU|blocked for more'; true") ||
        complaints="$complaints (the guest does not answer)"
    is "$1: no complaint of the kernel" "$complaints" ''
}
