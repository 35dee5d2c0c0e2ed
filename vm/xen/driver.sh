# Helpers for scenarios with our driver in the guest (`linux/netfront`).

DRIVER=ringfence-netfront
# Domain at the other end of the interface, which has ADDRESS.
PEER=dom0

# driven NAME N: 3 checks. A guest with its interface, which our driver has from the start; guests have the part
# `driver`.
driven() {
    networked $1 $2
    check "$1 uses our driver" driver_is $1 $DRIVER
}

driver_is() {
    on $1 "readlink /sys/class/net/eth0/device/driver | grep '/$2\$'"
}

# binds NAME FROM TO: the interface changes from one driver of the guest to another, or the same.
binds() {
    on $1 "echo vif-0 >/sys/bus/xen/drivers/$2/unbind && echo vif-0 >/sys/bus/xen/drivers/$3/bind"
}

# rebound NAME N TIMES: a check a time. Our driver lets go of the interface in the middle of traffic, and takes it again.
rebound() {
    local name=$1 number=$2 times=$3 round=0
    on $name "traffic echo 7000 >/dev/null 2>&1 &"
    while [ $round -lt $times ]; do
        round=$((round + 1))
        on $PEER "wait_for 10 traffic pulse 10.77.0.$number 7000 1"
        on $PEER "{ traffic pulse 10.77.0.$number 7000 60 >/dev/null 2>&1 & }"
        check "$name: our driver unbound and bound, round $round" bound_again $name $number $DRIVER $DRIVER ||
            note "$(ends_of $name)"
        on $PEER 'killall traffic'
    done
    on $name 'killall traffic'
}

bound_again() {
    binds $1 $3 $4 && again_with_address $1 $2
}

# ends_of NAME: both ends of the interface in the store, what went through it, the rings of xen-netback, and the event
# channels of dom0 to the guest, pending and masked or not.
ends_of() {
    local number=$(domain $1)
    xenstore-ls $BACKEND/vif/$number/0
    xenstore-ls /local/domain/$number/device/vif/0
    cat /sys/class/net/vif$number.0/statistics/[rt]x_packets
    ip neigh
    mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null
    tail -n +1 /sys/kernel/debug/xen-netback/vif$number.0/io_ring_q* 2>/dev/null
    grep vif$number.0 /proc/interrupts
    channels_of $number
    dmesg | tail -n 5
    on $1 'ip neigh; ethtool -S eth0; grep eth0 /proc/interrupts; dmesg | tail -n 5'
}

# channels_of DOMAIN: event channels of dom0 to it, `PORT [PENDING/MASKED/...]`, as the hypervisor's debug key `e` tells.
channels_of() {
    xl dmesg -c >/dev/null
    xl debug-keys e
    xl dmesg | awk -v to=" d=$1 " '/information for domain/ { ours = /domain 0:/ } ours && index($0, to)'
}

# during LABEL NAME N MEBIBYTES COMMAND...: 2 checks. A transfer from the other end to the guest, and the other way, while
# the command runs in dom0.
during() {
    local label=$1 name=$2 number=$3 size=$4
    shift 4
    PORT=$((${PORT:-5000} + 2))
    on $name "receive $PORT"
    on $PEER "receive $((PORT + 1))"
    on $PEER "{ traffic send 10.77.0.$number $PORT $size >/tmp/sent.$PORT 2>&1 & }"
    on $name "{ traffic send $ADDRESS $((PORT + 1)) $size >/tmp/sending 2>&1 & }"
    # A sender whose connection is not made before the link goes down can give up before it is back.
    on $name "wait_for 10 flows $PORT" && on $PEER "wait_for 10 flows $((PORT + 1))"
    "$@" || note "$label: \`$*\` ended with status $?"
    is "$label: $PEER to $name" "$(arrived $name $PORT)" "$(stream_sum $size)"
    is "$label: $name to $PEER" "$(arrived $PEER $((PORT + 1)))" "$(stream_sum $size)"
}

# arrived NAME PORT: the length and the SHA-256 of a stream that may still be on its way.
arrived() {
    ON_LIMIT=150 on $1 "wait_for 120 test -e /tmp/received.$2; received $2"
}

# returns NAME: the guest returns each datagram to port 7100.
returns() {
    on $1 '{ traffic return 7100 >/dev/null 2>&1; } & wait_for 10 grep -q :1BBC /proc/net/udp /proc/net/udp6'
}

# counter NAME PATTERN: the sum of the driver's counters whose names match.
counter() {
    on $1 "ethtool -S eth0" | awk -v name="^$2:\$" '$1 ~ name { sum += $2 } END { print sum + 0 }'
}

# counter_less NAME PATTERN OTHER: the first sum less the other one, of counters that were read at once.
counter_less() {
    on $1 "ethtool -S eth0" | awk -v name="^$2:\$" -v other="^$3:\$" '$1 ~ name { sum += $2 } $1 ~ other { sum -= $2 } END { print sum + 0 }'
}

# driven_from_domain NAME N: 5 checks. A PVH guest whose interface is served by the driver domain `net`, with our driver;
# guests have the part `driver`.
driven_from_domain() {
    PEER=net
    BACKEND=/local/domain/$(domain net)/backend
    SCRIPT=vif-ringfence
    check "guest $1 is created" guest $1 'type="pvh"' "$(vif $2 backend=net)"
    check "$1 takes commands" guest_ready $1 || give_up 'nothing to see'
    check "the hotplug script of the interface of $1 runs" plugged vif $1 0
    check "$1 has a network" again_with_address $1 $2 || note "$(on net 'tail -n 5 /tmp/serve.log') $(ends_of $1)"
    check "$1 uses our driver" driver_is $1 $DRIVER
}

# says NAME TEXT: the guest's driver logged this line, once or more often.
says() {
    on $1 "dmesg | grep -F '$2'"
}

# queues NAME COUNT: the guest's connection has so many, and works.
queues() {
    on $1 "wait_for 20 sh -c 'ethtool -l eth0 | tail -n 2 | grep -q \"Combined:.$2\$\"'" &&
        on $1 "wait_for 20 ping -c 1 -W 1 $ADDRESS"
}

# healthy NAME: 1 check. The guest's kernel has complained of nothing. One with kmemleak has found no lost memory of our
# driver, either: the second scan reports what is older than five seconds and still referenced by nothing.
healthy() {
    local complaints
    complaints=$(ON_LIMIT=90 on $1 "mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null;
        leaks=/sys/kernel/debug/kmemleak;
        [ ! -e \$leaks ] || { echo scan >\$leaks; sleep 6; echo scan >\$leaks; };
        { dmesg; cat \$leaks 2>/dev/null; } |
            grep -E 'BUG|WARNING|Oops|Call Trace|general protection|broke the protocol|ringfence_netfront\]|suspicious RCU|blocked for more'; true") ||
        complaints="$complaints (the guest does not answer)"
    is "$1: no complaint of the kernel" "$complaints" ''
}
