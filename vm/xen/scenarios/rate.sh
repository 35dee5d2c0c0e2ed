# title: rate= limits what a guest sends, and a new rate holds at once
# set: all
# machine: xen
# limit: 90

# check_timed_transfer LABEL FROM TO ADDRESS: checks that a MiB arrives. Sets TOOK to the seconds from its first byte
# to its last.
check_timed_transfer() {
    PORT=$((${PORT:-5000} + 1))
    on $3 "start_receiver $PORT" || { not_ok "$1" "$3 does not listen"; return 1; }
    TOOK=$(ON_LIMIT=60 on $2 "traffic send $4 $PORT 1 2>&1") || { not_ok "$1" "$2: $TOOK"; return 1; }
    TOOK=${TOOK% s}
    is "$1" "$(on $3 "received_stream $PORT")" "$(stream_sum 1)" && note "$1: $TOOK s"
}

# is_less A B: succeeds if A < B.
is_less() {
    awk "BEGIN { exit !($1 < $2) }"
}

use_ringfence
check 'a guest with a rate is created' create_guest one "$(vif_line 11 rate=200KB/s)" || give_up 'nothing to see'
check 'it has a network' start_network one 11
path=$BACKEND/vif/$(domain_id one)/0/rate
is 'libxl wrote its rate' "$(read_key $path)" 10000,50000
check_timed_transfer 'from the guest' one dom0 $ADDRESS
# 1 MiB, less what may come in a burst of 128 KiB.
check 'takes as long as it has to' is_less 4.0 $TOOK
check_timed_transfer 'to the guest' dom0 one 10.77.0.11
check 'is not limited' is_less $TOOK 4.0
check 'its waits are counted' on dom0 "ringfence status --json | grep -E '\"rate_limited\": *[1-9]'"
check 'a higher rate is written' xenstore-write $path 50000000,50000
check_timed_transfer 'from the guest again' one dom0 $ADDRESS
check 'holds at once' is_less $TOOK 4.0
complete_scenario
