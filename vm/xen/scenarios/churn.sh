# title: a guest destroyed in the middle of traffic and created again, ten times; nothing of it stays
# set: all
# machine: xen
# limit: 150

churn() {
    local number
    create_guest one "$(vif_line 11)" && start_network one 11 || return 1
    on one "traffic echo 7000 >/dev/null 2>&1 &"
    wait_for 10 traffic pulse 10.77.0.11 7000 0 || return 1
    traffic pulse 10.77.0.11 7000 60 >/dev/null 2>&1 &
    traffic receive 7001 >/dev/null 2>&1 &
    on one "traffic send $ADDRESS 7001 1000 >/dev/null 2>&1 &"
    sleep 1
    number=$(domain_id one)
    destroy_guest one $number && wait_for 10 test ! -e /sys/class/net/vif$number.0 || return 1
    killall traffic
}

use_ringfence
for round in 1 2 3 4 5 6 7 8 9 10; do
    check "round $round" churn
done
complete_scenario
