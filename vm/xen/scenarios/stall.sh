# title: a guest that takes no frames counts as stalled, until it takes them again
# set: all
# machine: xen
# limit: 60

stalled() {
    ringfence status | grep "vif$(domain one).0: stalled"
}

# counted NAME: it is not 0.
counted() {
    ringfence status --json | grep -E "\"$1\": *[1-9]"
}

goes_on() {
    ! stalled && counted stalls && counted stall_ends
}

plan 13
use_ringfence '[network]' 'stall-seconds = 2'
networked one 11
check_not 'it is not stalled' stalled
check 'the guest is stopped' xl pause one
# More than it has room for; to everybody, as nobody answers who asks for its address.
ping -i 0.01 10.77.0.255 >/dev/null 2>&1 &
FLOOD=$!
check 'what is sent to it cannot be taken' wait_for 20 stalled
kill $FLOOD
check 'the log says so' wait_for 5 grep -i 'stall' /share/serve-$SCENARIO.log
check 'the guest goes on' xl unpause one
check 'and is heard again' on one "wait_for 20 ping -c 1 -W 1 $ADDRESS"
check 'it is stalled no longer' wait_for 20 goes_on
gone one
