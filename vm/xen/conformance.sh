# Helpers for scenarios that run the conformance suite.

guests_with bench

# half NAME ROLE PEER: starts half of it in a guest.
half() {
    local run="ringfence-bench internal conformance --role $2 --peer $3 --patience $((20 * PATIENCE))"
    on $1 "rm -f /tmp/half.*; { $run >/tmp/half.log 2>&1; echo \$? >/tmp/half.status; } &"
}

# half_passed NAME: waits until it is done there; its status.
half_passed() {
    ON_LIMIT=150 on $1 'wait_for 140 test -s /tmp/half.status; cat /tmp/half.log; exit $(cat /tmp/half.status)'
}

# both_halves GUEST: four checks, between dom0 and the guest.
both_halves() {
    local each domain=$(domain $1) patience=$((20 * PATIENCE))
    half $1 lender 0
    check 'dom0 uses what the guest lends' ringfence-bench internal conformance \
        --role user --peer $domain --patience $patience
    check 'the guest says the same' half_passed $1
    half $1 user 0
    check 'the guest uses what dom0 lends' ringfence-bench internal conformance \
        --role lender --peer $domain --patience $patience
    check 'dom0 and the guest agree on that' half_passed $1
}

a_pair() {
    guest one && guest two
}
