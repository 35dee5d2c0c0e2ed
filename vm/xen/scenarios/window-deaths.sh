# title: a guest and its driver domain are destroyed in turn while packets flow through windows
# group: window-long
# set: name
# machine: xen-pvh
# limit: 1200
# driver: window

. /vm/xen/window.sh

# The fifty deaths of a release: --set DEATHS=50. Each destroys one side of a pair under load; the other side lives on, and
# is connected to a successor.
DEATHS=${DEATHS:-2}

# start_streams: starts streams both ways that last beyond the death, and waits until bytes arrive.
start_streams() {
    local before
    on net 'killall traffic 2>/dev/null; start_receiver 6000; { traffic echo 7000 >/dev/null 2>&1 & }'
    on one "killall traffic 2>/dev/null; { traffic send $ADDRESS 6000 2000 >/tmp/sending 2>&1 & };
        { traffic pulse $ADDRESS 7000 100 >/tmp/pulse 2>&1 & }"
    before=$(received_bytes)
    wait_for 20 has_received $((before + 2000000))
}

received_bytes() {
    on net 'cat /sys/class/net/xenbr0/statistics/rx_bytes' | tr -d '\r' | grep .
}

has_received() {
    [ $(received_bytes) -gt $1 ]
}

# check_death VICTIM SURVIVOR: checks that one side can be destroyed while packets flow through its windows, and that
# nothing of it is left.
check_death() {
    local number free
    check "death $death: packets flow" start_streams
    check "death $death: two windows are open" windows_are_open 2
    number=$(domain_id $1)
    xl destroy $1
    check "death $death: $1 is destroyed under load, and is no zombie" wait_for 30 domain_is_gone $number
    check "death $death: no window is left" wait_for 10 windows_are_open 0
    check "death $death: $2 lives" on $2 'head -c 1048576 /dev/urandom | sha256sum'
    # With the same survivor, as after the first death of its peer.
    free=$(free_memory)
    case $1 in
        one) free_without_one=${free_without_one:-$free} ; is "death $death: memory is free again" $free $free_without_one ;;
        net) free_without_net=${free_without_net:-$free} ; is "death $death: memory is free again" $free $free_without_net ;;
    esac
    note "death $death, $(uptime_now) s: $1; free memory $free MiB"
}

# check_new_pair: checks that the guest gets a device of a new driver domain. The device of the old one stays without
# a backend.
check_new_pair() {
    create_driver_domain '[network]\nmode = "window"\n'
    on one 'kill $(cat /tmp/attach.pid); killall traffic; wait_for 10 sh -c "! test -e /sys/class/net/eth0"'
    check "death $death: one gets a device of the new driver domain" \
        xl network-attach one mac=00:16:3e:77:00:0b backend=net script=vif-ringfence
    connect_with_windows one 11 1 1
}

guests_with window
before=$(free_memory)
create_driver_domain '[network]\nmode = "window"\n'
create_guest_with_windows one 11
death=0
while [ $death -lt $DEATHS ]; do
    death=$((death + 1))
    case $((death % 2)) in
        1)
            check_death one net
            [ $death = $DEATHS ] || create_guest_with_windows one 11
            ;;
        0)
            check_death net one
            [ $death = $DEATHS ] || check_new_pair
            ;;
    esac
done
for each in one net; do xl destroy $each 2>/dev/null; done
check 'all domains are gone' wait_for 30 only_dom0_is_left
is 'the memory is free again' "$(free_memory)" "$before"
complete_scenario
