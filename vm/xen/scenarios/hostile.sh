# title: a guest breaks every rule of a vif, from user space: dom0 and another guest go on
# set: all
# machine: xen
# limit: 120
# grants: bad

# The guest's own driver lets go of the interface, and the hostile one takes it.
unbind() {
    on rogue 'wait_for 20 test -e /sys/bus/xen/drivers/vif/vif-0 && echo vif-0 >/sys/bus/xen/drivers/vif/unbind'
}

# Until it has done its worst, streams go to and fro between the other guest and dom0.
goes_on() {
    local rounds=0
    while ! on rogue 'test -s /tmp/hostile.status'; do
        stream_of_one good dom0 $ADDRESS && stream_of_one dom0 good 10.77.0.11 || return 1
        rounds=$((rounds + 1))
    done
    echo "$rounds MiB each way meanwhile"
    [ $rounds -gt 0 ]
}

# stream_of_one FROM TO ADDRESS: a MiB, not counted as a check.
stream_of_one() {
    PORT=$((${PORT:-4000} + 1))
    on $2 "receive $PORT" && ON_LIMIT=60 on $1 "traffic send $3 $PORT 1" &&
        [ "$(on $2 "received $PORT")" = "$(stream_sum 1)" ]
}

# What it did, and whether that was all it was to do.
did_its_worst() {
    on rogue 'cat /tmp/hostile.log; exit $(cat /tmp/hostile.status)'
}

keys_tried() {
    on rogue 'grep "^keys: all 16 tried" /tmp/hostile.log'
}

# rules NAME: how many kinds of rules the first interface of a guest is charged with.
rules() {
    ringfence status --json | awk -v vif="\"vif$(domain $1).0\"" '
        /"name":/ { ours = index($0, vif) } ours && /"rules": \{/ { inside = 1; next }
        /\}/ { inside = 0 } inside { count++ } END { print count + 0 }'
}

bound_again() {
    on rogue 'echo vif-0 >/sys/bus/xen/drivers/vif/bind' && again_with_address rogue 12
}

use_ringfence
networked good 11
guests_with bench
check 'a hostile guest is created' guest rogue "$(vif 12)" || give_up 'nobody is hostile'
check 'it takes commands' guest_ready rogue || give_up 'nobody is hostile'
check 'its own driver lets go of the interface' unbind
on rogue "{ ringfence-bench internal hostile-guest --seconds 1 >/tmp/hostile.log 2>&1; echo \$? >/tmp/hostile.status; } &"
check 'the other guest goes on meanwhile' goes_on
check 'the hostile guest did its worst' did_its_worst
check 'no set of bad keys was left out' keys_tried
check 'the daemon is still the same' test -d /proc/$SERVE
note "kinds of rules it is charged with: $(rules rogue)"
check 'it is charged with what it did' test "$(rules rogue)" -gt 3
is 'the other guest is not' "$(rules good)" 0
check 'its own driver can have the interface again' bound_again
check_not 'dom0 has nothing to complain of' on dom0 "dmesg | grep -E 'BUG|WARNING|Oops|Call Trace'"
check 'the hostile guest is destroyed, and leaves nothing' destroyed rogue $(domain rogue)
check 'so does the other one' destroyed good $(domain good)
complete
