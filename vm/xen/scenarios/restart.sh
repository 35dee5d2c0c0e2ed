# title: the daemon killed and started again under traffic; the guest does not notice
# set: core
# machine: xen
# limit: 90

# watch_states: records each write of a state, of which there must be none while the daemon restarts.
watch_states() {
    for path in $BACKEND/vif/$(domain_id one)/0/state /local/domain/$(domain_id one)/device/vif/0/state; do
        xenstore-watch $path >>/tmp/states &
    done
    wait_for 5 state_changes_are 2
}

state_changes_are() {
    [ "$(wc -l </tmp/states)" -eq $1 ]
}

# pulse_result: prints the number of answers on a connection that lasts all the time, and the longest silence.
pulse_result() {
    wait_for 30 on one 'test -s /tmp/pulse' && on one 'cat /tmp/pulse'
}

use_ringfence
create_networked_guest one 11
check_transfer 'before' one dom0 $ADDRESS 8
check 'states are watched' watch_states
traffic echo 7000 &
on one "{ traffic pulse $ADDRESS 7000 15 >/tmp/pulse.new 2>&1; mv /tmp/pulse.new /tmp/pulse; } &"
sleep 2
check 'killed and started' restart_daemon
pulse=$(pulse_result)
note "exchanges and longest silence in ms: $pulse"
# 5 s with the default patience.
longest=$((1250 * PATIENCE))
check "a connection goes on within $longest ms" test "${pulse#* }" -lt $longest
check 'killed and started again' restart_daemon
check_transfer 'a new connection has no damage' one dom0 $ADDRESS 8
check 'nobody wrote a state' state_changes_are 2
check 'both ends are connected' vif_connected one
check 'it was taken over as it was' on dom0 'ringfence status | grep "taken over"'
complete_scenario
