# title: floods of pings with 60,000 bytes both ways beside a stream: what is answered with `ringfence serve`, and with xen-netback
# set: all
# machine: xen-netback
# limit: 150

# answered_pings FILE: prints the number of answers in the output of `ping -q`.
answered_pings() {
    awk '/packets received/ { for (i = 1; i < NF; i++) if ($(i + 1) == "packets" && $(i + 2) ~ /^received/) print $i }' $1
}

# note_drops BACKEND: notes the counters that show where packets of the flood were dropped.
note_drops() {
    note "$1: dom0's end: $(packet_counters vif$(domain_id one).0); $(reassembly_counters)"
    note "$1: the guest's end: $(on one '. /vm/xen/net.sh; packet_counters eth0; reassembly_counters' | tr '\r\n' '  ')"
    ringfence status --json 2>/dev/null | grep -E '"(drop_[a-z_]*|hold_ups)": [1-9]' | tr -d ' \n' >/tmp/counts
    note "$1: $(cat /tmp/counts)"
}

# dropped_by_tap: prints the frames to the guest that found the TAP's queue full: as `status` counts them, and as the kernel
# does.
dropped_by_tap() {
    local status=$(ringfence status --json | sed -n 's/.*"drop_queue_full": *\([0-9]*\).*/\1/p')
    echo ${status:-0} $(cat /sys/class/net/vif$(domain_id one).0/statistics/tx_dropped)
}

# check_dropped_by_tap: checks that `status` shows the drops of a TAP's queue, which is made short and flooded.
check_dropped_by_tap() {
    local tap=vif$(domain_id one).0 both
    ip link set $tap qlen 2
    ping -q -c 20 -i 0.01 -W 2 -s 60000 10.77.0.11 >/dev/null 2>&1
    both=$(dropped_by_tap)
    ip link set $tap qlen 1000
    note "frames that a queue of two drops, by status and by the kernel: $both"
    check 'a queue of two drops some' test ${both#* } -gt 0
    is 'status shows as many as the kernel' ${both% *} ${both#* }
}

# check_flood BACKEND: checks that some of 200 pings at a hundred a second, from each end to the other at once, in 41
# fragments each, are answered; that streams beside such a flood arrive; and that every ping is answered afterwards.
# Sets ANSWERED to the number of answers.
check_flood() {
    local backend=$1 out in flood
    create_networked_guest one 11
    # By default a socket may have two such pings under way, and the third ends busybox' ping.
    on one 'echo 8000000 >/proc/sys/net/core/wmem_default'
    on one "{ ping -q -c 200 -i 0.01 -W 5 -s 60000 $ADDRESS >/tmp/flood 2>&1; echo >>/tmp/flood.done; } &"
    ping -q -c 200 -i 0.01 -W 5 -s 60000 10.77.0.11 >/tmp/flood 2>&1
    check "$backend: the flood from the guest ends" on one 'wait_for 60 test -e /tmp/flood.done'
    on one 'cat /tmp/flood' >/tmp/flood.one
    out=$(answered_pings /tmp/flood.one) in=$(answered_pings /tmp/flood)
    ANSWERED=$((${out:-0} + ${in:-0}))
    note "$backend: of 200 pings each way, answered: ${out:-0} of the guest's, ${in:-0} of dom0's"
    note_drops $backend
    check "$backend: some are answered each way" test ${out:-0} -gt 0 -a ${in:-0} -gt 0
    (ping -q -c 1000 -i 0.01 -W 5 -s 60000 10.77.0.11 >/dev/null 2>&1) &
    flood=$!
    check_transfer "$backend, beside a flood: dom0 to one" dom0 one 10.77.0.11 4
    check_transfer "$backend, beside a flood: one to dom0" one dom0 $ADDRESS 4
    kill $flood
    killall ping
    check "$backend: afterwards every ping is answered" on one "wait_for 20 sh -c 'ping -c 5 -i 0.2 -W 5 -s 60000 $ADDRESS | grep \" 0% packet loss\"'"
    [ $backend != serve ] || check_dropped_by_tap
    check_not "$backend: the guest's kernel has nothing to complain of" on one "dmesg | grep -E 'BUG|WARNING|Oops|Call Trace'"
    check_destruction one
}

echo 8000000 >/proc/sys/net/core/wmem_default
use_ringfence
check_flood serve
ours=$ANSWERED
check_not 'nothing is charged to the guest' on dom0 "ringfence status | grep 'rules broken'"
kill $SERVE
wait $SERVE
ip link delete xenbr0
use_netback
check_flood netback
# No bound on it: a TAP drops what finds its queue full, where xen-netback stops the sender, so a slow computer answers fewer.
note "answered with serve and with xen-netback: $ours, $ANSWERED"
complete_scenario
