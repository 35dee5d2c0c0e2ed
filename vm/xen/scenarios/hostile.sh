# title: a guest breaks every rule of a vif, from user space: dom0 and another guest go on
# set: all
# machine: xen
# limit: 120
# grants: bad

# unbind_netfront: takes the interface from the guest's own driver.
unbind_netfront() {
    on hostile 'wait_for 20 test -e /sys/bus/xen/drivers/vif/vif-0 && echo vif-0 >/sys/bus/xen/drivers/vif/unbind'
}

# other_guest_continues: sends streams both ways between the other guest and dom0 until the attack has ended.
other_guest_continues() {
    local rounds=0
    while ! on hostile 'test -s /tmp/hostile.status'; do
        send_mebibyte good dom0 $ADDRESS && send_mebibyte dom0 good 10.77.0.11 || return 1
        rounds=$((rounds + 1))
    done
    echo "$rounds MiB each way meanwhile"
    [ $rounds -gt 0 ]
}

# send_mebibyte FROM TO ADDRESS: sends a MiB, and compares its sum. Reports no check.
send_mebibyte() {
    PORT=$((${PORT:-4000} + 1))
    on $2 "start_receiver $PORT" && ON_LIMIT=60 on $1 "traffic send $3 $PORT 1" &&
        [ "$(on $2 "received_stream $PORT")" = "$(stream_sum 1)" ]
}

# attack_succeeded: prints the attack's log, and returns its status.
attack_succeeded() {
    on hostile 'cat /tmp/hostile.log; exit $(cat /tmp/hostile.status)'
}

all_keys_were_tried() {
    on hostile 'grep "^keys: all 16 tried" /tmp/hostile.log'
}

# violated_rules NAME: prints the number of kinds of rules that the guest's first interface has violated.
violated_rules() {
    ringfence status --json | awk -v vif="\"vif$(domain_id $1).0\"" '
        /"name":/ { ours = index($0, vif) } ours && /"rules": \{/ { inside = 1; next }
        /\}/ { inside = 0 } inside { count++ } END { print count + 0 }'
}

bind_netfront() {
    on hostile 'echo vif-0 >/sys/bus/xen/drivers/vif/bind' && configure_network hostile 12
}

use_ringfence
create_networked_guest good 11
guests_with bench
check 'a hostile guest is created' create_guest hostile "$(vif_line 12)" || give_up 'nobody is hostile'
check 'it takes commands' guest_ready hostile || give_up 'nobody is hostile'
check 'its own driver lets go of the interface' unbind_netfront
on hostile "{ ringfence-bench internal hostile-guest --seconds 1 >/tmp/hostile.log 2>&1; echo \$? >/tmp/hostile.status; } &"
check 'the other guest goes on meanwhile' other_guest_continues
check 'the hostile guest did its worst' attack_succeeded
check 'no set of bad keys was left out' all_keys_were_tried
check 'the daemon is still the same' test -d /proc/$SERVE
note "kinds of rules it is charged with: $(violated_rules hostile)"
check 'it is charged with what it did' test "$(violated_rules hostile)" -gt 3
is 'the other guest is not' "$(violated_rules good)" 0
check 'its own driver can have the interface again' bind_netfront
check_not 'dom0 has nothing to complain of' on dom0 "dmesg | grep -E 'BUG|WARNING|Oops|Call Trace'"
check 'the hostile guest is destroyed, and leaves nothing' destroy_guest hostile $(domain_id hostile)
check 'so does the other one' destroy_guest good $(domain_id good)
complete_scenario
