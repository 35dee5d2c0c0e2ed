# Helpers for scenarios that run the conformance suite.

guests_with bench

# start_half NAME ROLE PEER: starts one half of the suite in a guest.
start_half() {
    local run="ringfence-bench internal conformance --role $2 --peer $3 --patience $((20 * PATIENCE))"
    on $1 "rm -f /tmp/half.*; { $run >/tmp/half.log 2>&1; echo \$? >/tmp/half.status; } &"
}

# half_passes NAME: waits until that half has ended, and returns its status.
half_passes() {
    ON_LIMIT=150 on $1 'wait_for 140 test -s /tmp/half.status; cat /tmp/half.log; exit $(cat /tmp/half.status)'
}

# check_both_halves GUEST: checks both roles between dom0 and the guest.
check_both_halves() {
    local each domain=$(domain_id $1) patience=$((20 * PATIENCE))
    start_half $1 lender 0
    check 'dom0 uses what the guest lends' ringfence-bench internal conformance \
        --role user --peer $domain --patience $patience
    check 'the guest says the same' half_passes $1
    start_half $1 user 0
    check 'the guest uses what dom0 lends' ringfence-bench internal conformance \
        --role lender --peer $domain --patience $patience
    check 'dom0 and the guest agree on that' half_passes $1
}

create_pair() {
    create_guest one && create_guest two
}
