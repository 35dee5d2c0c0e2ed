# title: rate= limits what a guest sends, and a new rate holds at once
# set: all
# machine: xen
# limit: 90

# seconds_for LABEL FROM TO ADDRESS MEBIBYTES: a transfer, and in TOOK how long it took.
seconds_for() {
    local begin
    begin=$(uptime_now)
    transfer "$@"
    TOOK=$(since $begin)
    note "$1: $TOOK s"
}

# less A B
less() {
    awk "BEGIN { exit !($1 < $2) }"
}

plan 14
use_ringfence
check 'a guest with a rate is created' guest one "$(vif 11 rate=200KB/s)" || give_up 'nothing to see'
check 'it has a network' ready_with_address one 11
path=$BACKEND/vif/$(domain one)/0/rate
is 'libxl wrote its rate' "$(key $path)" 10000,50000
seconds_for 'from the guest' one dom0 $ADDRESS 1
# 1 MiB, less what may come in a burst of 128 KiB.
check 'takes as long as it has to' less 4.0 $TOOK
seconds_for 'to the guest' dom0 one 10.77.0.11 1
check 'is not limited' less $TOOK 4.0
check 'its waits are counted' on dom0 "ringfence status --json | grep -E '\"rate_limited\": *[1-9]'"
check 'a higher rate is written' xenstore-write $path 50000000,50000
seconds_for 'from the guest again' one dom0 $ADDRESS 1
check 'holds at once' less $TOOK 4.0
