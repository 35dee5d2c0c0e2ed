# Checks of network backends: the same functions judge the kernel's own backend and ours.

# vif_line N [MORE]: prints the configuration line of an interface with a MAC address of that number.
vif_line() {
    printf "vif=['mac=00:16:3e:77:00:%02x,bridge=xenbr0,script=%s%s']" $1 $SCRIPT "${2:+,$2}"
}

# use_netback: checks that dom0 has the kernel's xen-netback, which serves the guests that follow, and a bridge.
use_netback() {
    SCRIPT=vif-control
    check 'the kernel has xen-netback' modprobe xen-netback
    check 'dom0 has a bridge' create_bridge
}

# use_ringfence [LINE...]: checks that dom0 has a bridge and `ringfence serve`, with these lines in its configuration,
# and that the kernel has no backend loaded.
use_ringfence() {
    SCRIPT=vif-ringfence
    check_not 'the kernel has no backend loaded' grep -E '^xen_(netback|blkback) ' /proc/modules
    check 'dom0 has a bridge' create_bridge
    write_configuration "$@"
    check 'ringfence serve is ready' start_daemon || give_up 'without a backend there is nothing to see'
}

# write_configuration [LINE...]: writes the daemon's configuration.
write_configuration() {
    printf '%s\n' "$@" >/tmp/serve.toml
}

# start_daemon: starts the daemon, and waits until it answers. Its log is serve-SCENARIO.log, its process $SERVE.
start_daemon() {
    ringfence serve --config /tmp/serve.toml >>/share/serve-$SCENARIO.log 2>&1 &
    SERVE=$!
    wait_for 15 ringfence status
}

# restart_daemon: kills the daemon without a chance to end in order, and starts another.
restart_daemon() {
    kill -9 $SERVE
    wait $SERVE
    start_daemon
}

# reload_daemon [LINE...]: gives the running daemon another valid configuration.
reload_daemon() {
    write_configuration "$@"
    ringfence serve --check --config /tmp/serve.toml && kill -HUP $SERVE
}

# vif_connected NAME: succeeds if both ends of the guest's first interface are connected.
vif_connected() {
    key_is $BACKEND/vif/$(domain_id $1)/0/state 4 && key_is /local/domain/$(domain_id $1)/device/vif/0/state 4
}

# create_networked_guest NAME N: checks that a guest with one interface starts, and reaches dom0 from 10.77.0.N. Ends
# the scenario otherwise.
create_networked_guest() {
    check "guest $1 is created" create_guest $1 "$(vif_line $2)" || give_up 'without a guest there is nothing to see'
    check "$1 has a network" start_network $1 $2 || give_up 'without a network there is nothing to see'
}

# start_network NAME N: waits for a guest, and configures its network.
start_network() {
    guest_ready $1 && assign_addresses $1 $2 && on $1 "wait_for 20 ping -c 1 -W 1 $ADDRESS"
}

# check_pings NAME: checks that dom0 answers packets of all sizes, fragmented ones among them.
check_pings() {
    local size
    for size in 64 1472 1473 8000 20000 65000; do
        check "$1 pings with $size bytes" on $1 "ping -c 3 -i 0.2 -W 5 -s $size $ADDRESS"
    done
}

# check_streams NAME N MEBIBYTES: checks TCP between guest and dom0, each way, by IPv4 and IPv6. Notes the processor
# time of dom0.
check_streams() {
    local name=$1 number=$2 size=$3 before
    before=$(cpu_seconds Domain-0)
    check_transfer "$name to dom0, IPv4" $name dom0 $ADDRESS $size
    note "dom0 used $(cpu_used Domain-0 $before) s of processor time"
    before=$(cpu_seconds Domain-0)
    check_transfer "dom0 to $name, IPv4" dom0 $name 10.77.0.$number $size
    note "dom0 used $(cpu_used Domain-0 $before) s of processor time"
    check_transfer "$name to dom0, IPv6" $name dom0 $ADDRESS6 $size
    check_transfer "dom0 to $name, IPv6" dom0 $name fd77::$number $size
}

# check_one_guest MEBIBYTES: checks pings and streams of one guest.
check_one_guest() {
    create_networked_guest one 11
    check_pings one
    check_streams one 11 $1
}

# check_two_guests MEBIBYTES: checks streams of two guests to each other and to dom0, at the same time.
check_two_guests() {
    local beside
    create_networked_guest one 11
    create_networked_guest two 12
    check_transfer 'one to two' one two 10.77.0.12 $1
    check_transfer 'two to one, IPv6' two one fd77::11 $1
    # Each transfer has a port of its own. `wait` without a process id would wait for the daemon too.
    (PORT=6000; check_transfer 'one to dom0, while two sends' one dom0 $ADDRESS $1) &
    beside=$!
    (PORT=6100; check_transfer 'two to dom0, while one sends' two dom0 $ADDRESS $1)
    wait_for_checks $beside
    (PORT=6200; check_transfer 'dom0 to one, while two receives' dom0 one 10.77.0.11 $1) &
    beside=$!
    (PORT=6300; check_transfer 'dom0 to two, while one receives' dom0 two 10.77.0.12 $1)
    wait_for_checks $beside
}

# check_rebinding NAME N TIMES: checks that a guest's driver can be unbound in the middle of traffic and bound again.
check_rebinding() {
    local name=$1 number=$2 times=$3 round=0
    while [ $round -lt $times ]; do
        round=$((round + 1))
        on $name "traffic echo 7000 >/dev/null 2>&1 &"
        on dom0 "wait_for 10 traffic pulse 10.77.0.$number 7000 1"
        (traffic pulse 10.77.0.$number 7000 60 >/dev/null 2>&1 &)
        check "$name: driver unbound and bound again, round $round" rebind_netfront $name
        check "$name: the network is back, round $round" configure_network $name $number
        on $name 'killall traffic'
        killall traffic
    done
}

# rebind_netfront NAME: unbinds the guest's driver from its interface, and binds it again.
rebind_netfront() {
    on $1 "cd /sys/bus/xen/drivers/vif && echo vif-0 >unbind && usleep 500000 && echo vif-0 >bind"
}

# configure_network NAME N: assigns the addresses to eth0, and waits until dom0 answers.
configure_network() {
    assign_addresses $1 $2 && on $1 "wait_for 20 ping -c 1 -W 1 $ADDRESS"
}

# check_save_and_restore NAME N: checks that the network of a guest works after it was saved to a file and restored.
check_save_and_restore() {
    check "$1 is saved" xl save $1 /tmp/$1.save
    check "$1 is restored" xl restore /tmp/$1.save
    find_console $1
    check "$1: the network is back after restoring" on $1 "wait_for 30 ping -c 1 -W 1 $ADDRESS"
    check_transfer "$1 to dom0, after restoring" $1 dom0 $ADDRESS 8
    rm -f /tmp/$1.save
}

# check_destruction NAME: checks that a guest can be destroyed, and that the hypervisor then has nothing of it: no
# domain, no mapped page, no event channel of dom0 that leads to it.
check_destruction() {
    local number=$(domain_id $1)
    check "$1 is destroyed, and nothing of it stays" destroy_guest $1 $number
}

# destroy_guest NAME DOMAIN: destroys a guest with this number, and waits until nothing of it is left.
destroy_guest() {
    xl destroy $1 && wait_for 10 nothing_left $2 ||
        { xl list; grants_in_use $2; channels_to $2; return 1; }
}

# check_attach: checks that `ringfence attach` can use the interface of a new guest.
check_attach() {
    create_networked_guest one 11
    check_attach_takes_over one 11 vif
}

# check_attach_takes_over NAME N DRIVER: checks that the guest's driver lets go of the interface, and that `ringfence
# attach` uses it then.
check_attach_takes_over() {
    local name=$1 number=$2
    on $name "echo vif-0 >/sys/bus/xen/drivers/$3/unbind; load_modules tun"
    check 'no driver has the interface' on $name 'test ! -e /sys/class/net/eth0'
    on $name 'ringfence attach --device 0 --name eth0 >/tmp/attach.log 2>&1 & echo $! >/tmp/attach.pid'
    check 'ringfence attach gives the guest its interface' configure_network $name $number ||
        note "$(on $name 'tail -n 5 /tmp/attach.log')"
    check 'it is one of user space' on $name 'test -e /sys/class/net/eth0/tun_flags'
    check_transfer 'attach to dom0' $name dom0 $ADDRESS 16
    check_transfer 'dom0 to attach, IPv6' dom0 $name fd77::$number 16
    check 'it leaves in order' on $name 'kill $(cat /tmp/attach.pid) && wait_for 10 test ! -e /proc/$(cat /tmp/attach.pid)'
}

# reassembly_counters: prints the numbers of datagrams that IP has reassembled and given up.
reassembly_counters() {
    awk '$1 == "Ip:" && $2 ~ /^[0-9]/ { printf "whole %d, given up %d", $16, $17 }' /proc/net/snmp
}

# packet_counters INTERFACE: prints the packets that an interface has received, sent and dropped.
packet_counters() {
    local each
    for each in rx_packets rx_dropped tx_packets tx_dropped; do
        echo "$each $(cat /sys/class/net/$1/statistics/$each)"
    done | tr '\n' ' '
}
