# What is checked with every network backend, the kernel's own or ours: the same lines judge both.
# Each function says how many checks it makes.

# vif N [MORE]: the configuration line for a guest's interface with a MAC address of that number.
vif() {
    printf "vif=['mac=00:16:3e:77:00:%02x,bridge=xenbr0,script=%s%s']" $1 $SCRIPT "${2:+,$2}"
}

# use_netback: 2 checks. Guests are served by the kernel's xen-netback.
use_netback() {
    SCRIPT=vif-control
    check 'the kernel has xen-netback' modprobe xen-netback
    check 'dom0 has a bridge' bridge
}

# use_ringfence [LINE...]: 3 checks. Guests are served by `ringfence serve`, with these lines in its
# configuration, and with none of the kernel's backends.
use_ringfence() {
    SCRIPT=vif-ringfence
    check_not 'the kernel has no backend loaded' grep -E '^xen_(netback|blkback) ' /proc/modules
    check 'dom0 has a bridge' bridge
    configure "$@"
    check 'ringfence serve is ready' serve || give_up 'without a backend there is nothing to see'
}

# configure [LINE...]: the daemon's configuration.
configure() {
    printf '%s\n' "$@" >/tmp/serve.toml
}

# serve: starts the daemon, and waits until it answers. Its log is serve-SCENARIO.log.
serve() {
    ringfence serve --config /tmp/serve.toml >>/share/serve-$SCENARIO.log 2>&1 &
    SERVE=$!
    wait_for 15 ringfence status
}

# killed_and_started: the daemon gets no chance to end in order.
killed_and_started() {
    kill -9 $SERVE
    wait $SERVE
    serve
}

# reload [LINE...]: gives it another configuration.
reload() {
    configure "$@"
    ringfence serve --check --config /tmp/serve.toml && kill -HUP $SERVE
}

# connected NAME: both ends of the first interface say so.
connected() {
    key_is $BACKEND/vif/$(domain $1)/0/state 4 && key_is /local/domain/$(domain $1)/device/vif/0/state 4
}

# networked NAME N: 2 checks. A guest with its interface, which has 10.77.0.N and fd77::N.
networked() {
    check "guest $1 is created" guest $1 "$(vif $2)" || give_up 'without a guest there is nothing to see'
    check "$1 has a network" ready_with_address $1 $2 || give_up 'without a network there is nothing to see'
}

ready_with_address() {
    guest_ready $1 && address $1 $2 && on $1 "wait_for 20 ping -c 1 -W 1 $ADDRESS"
}

# pings NAME: 6 checks. Dom0 answers packets of all sizes, fragmented ones among them.
pings() {
    local size
    for size in 64 1472 1473 8000 20000 65000; do
        check "$1 pings with $size bytes" on $1 "ping -c 3 -i 0.2 -W 5 -s $size $ADDRESS"
    done
}

# streams NAME N MEBIBYTES: 4 checks. TCP between guest and dom0, each way, IPv4 and IPv6; notes the
# processor time that dom0 spends on it.
streams() {
    local name=$1 number=$2 size=$3 before
    before=$(cpu_seconds Domain-0)
    transfer "$name to dom0, IPv4" $name dom0 $ADDRESS $size
    note "dom0 used $(cpu_used Domain-0 $before) s of processor time"
    before=$(cpu_seconds Domain-0)
    transfer "dom0 to $name, IPv4" dom0 $name 10.77.0.$number $size
    note "dom0 used $(cpu_used Domain-0 $before) s of processor time"
    transfer "$name to dom0, IPv6" $name dom0 $ADDRESS6 $size
    transfer "dom0 to $name, IPv6" dom0 $name fd77::$number $size
}

# one_guest MEBIBYTES: 12 checks.
one_guest() {
    networked one 11
    pings one
    streams one 11 $1
}

# two_guests MEBIBYTES: 10 checks. They talk to each other and to dom0, at the same time.
two_guests() {
    local beside
    networked one 11
    networked two 12
    transfer 'one to two' one two 10.77.0.12 $1
    transfer 'two to one, IPv6' two one fd77::11 $1
    # Each transfer has a port of its own. `wait` without a process id would wait for the daemon too.
    (PORT=6000; transfer 'one to dom0, while two sends' one dom0 $ADDRESS $1) &
    beside=$!
    (PORT=6100; transfer 'two to dom0, while one sends' two dom0 $ADDRESS $1)
    wait_for_checks $beside
    (PORT=6200; transfer 'dom0 to one, while two receives' dom0 one 10.77.0.11 $1) &
    beside=$!
    (PORT=6300; transfer 'dom0 to two, while one receives' dom0 two 10.77.0.12 $1)
    wait_for_checks $beside
}

# rebinding NAME N TIMES: 2 checks a time. Its driver lets go of the device in the middle of traffic,
# and takes it again.
rebinding() {
    local name=$1 number=$2 times=$3 round=0
    while [ $round -lt $times ]; do
        round=$((round + 1))
        on $name "traffic echo 7000 >/dev/null 2>&1 &"
        on dom0 "wait_for 10 traffic pulse 10.77.0.$number 7000 1"
        (traffic pulse 10.77.0.$number 7000 60 >/dev/null 2>&1 &)
        check "$name: driver unbound and bound again, round $round" rebind $name
        check "$name: the network is back, round $round" again_with_address $name $number
        on $name 'killall traffic'
        killall traffic
    done
}

rebind() {
    on $1 "cd /sys/bus/xen/drivers/vif && echo vif-0 >unbind && usleep 500000 && echo vif-0 >bind"
}

again_with_address() {
    address $1 $2 && on $1 "wait_for 20 ping -c 1 -W 1 $ADDRESS"
}

# saving NAME N: 4 checks. Saved to a file and restored, its network works.
saving() {
    check "$1 is saved" xl save $1 /tmp/$1.save
    check "$1 is restored" xl restore /tmp/$1.save
    console $1
    check "$1: the network is back after restoring" on $1 "wait_for 30 ping -c 1 -W 1 $ADDRESS"
    transfer "$1 to dom0, after restoring" $1 dom0 $ADDRESS 8
    rm -f /tmp/$1.save
}

# gone NAME: 1 check. The guest is destroyed, and the hypervisor has nothing of it: neither itself, nor a
# page that is mapped, nor an event channel of dom0's that leads to it.
gone() {
    local number=$(domain $1)
    check "$1 is destroyed, and nothing of it stays" destroyed $1 $number
}

destroyed() {
    xl destroy $1 && wait_for 10 nothing_left $2 ||
        { xl list; grants_in_use $2; channels_to $2; return 1; }
}

# attached: 8 checks. In a guest whose driver has let go of its interface, `ringfence attach` has it.
attached() {
    networked one 11
    attach_takes_over one 11 vif
}

# attach_takes_over NAME N DRIVER: 6 checks. The guest's driver lets go of the interface, and `ringfence attach` has it.
attach_takes_over() {
    local name=$1 number=$2
    on $name "echo vif-0 >/sys/bus/xen/drivers/$3/unbind; load tun"
    check 'no driver has the interface' on $name 'test ! -e /sys/class/net/eth0'
    on $name 'ringfence attach --device 0 --name eth0 >/tmp/attach.log 2>&1 & echo $! >/tmp/attach.pid'
    check 'ringfence attach gives the guest its interface' again_with_address $name $number ||
        note "$(on $name 'tail -n 5 /tmp/attach.log')"
    check 'it is one of user space' on $name 'test -e /sys/class/net/eth0/tun_flags'
    transfer 'attach to dom0' $name dom0 $ADDRESS 16
    transfer 'dom0 to attach, IPv6' dom0 $name fd77::$number 16
    check 'it leaves in order' on $name 'kill $(cat /tmp/attach.pid) && wait_for 10 test ! -e /proc/$(cat /tmp/attach.pid)'
}

# reassembly: datagrams that IP has put together, and those that it gave up.
reassembly() {
    awk '$1 == "Ip:" && $2 ~ /^[0-9]/ { printf "whole %d, given up %d", $16, $17 }' /proc/net/snmp
}

# dropped INTERFACE: packets that an interface has received and sent, and dropped.
dropped() {
    local each
    for each in rx_packets rx_dropped tx_packets tx_dropped; do
        echo "$each $(cat /sys/class/net/$1/statistics/$each)"
    done | tr '\n' ' '
}
