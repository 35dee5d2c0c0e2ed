# title: the engine of grant windows passes the conformance suite's window cases between two PVH guests
# group: window
# set: name
# machine: xen-pvh
# limit: 200
# driver: window

. /vm/xen/window.sh

# start_half NAME ROLE PEER: starts one half of the cases in a guest.
start_half() {
    local run="ringfence-bench internal conformance --windows --role $2 --peer $3 --patience $((30 * PATIENCE))"
    on $1 "rm -f /tmp/half.*; { $run >/tmp/half.log 2>&1; echo \$? >/tmp/half.status; } &"
}

# half_passes NAME: waits until that half has ended, and returns its status.
half_passes() {
    ON_LIMIT=150 on $1 'wait_for 140 test -s /tmp/half.status; cat /tmp/half.log; exit $(cat /tmp/half.status)'
}

guests_with bench window
before=$(free_memory)
check 'a granter is created' create_guest one 'type="pvh"' || give_up 'without a granter there is nothing to see'
check 'a grantee is created' create_guest two 'type="pvh"' || give_up 'without a grantee there is nothing to see'
check 'they take commands' guest_ready one two || give_up 'guests that do not answer show nothing'
check 'the granter has the device' load_window_module one
check 'the grantee has it' load_window_module two
start_half two user $(domain_id one)
start_half one lender $(domain_id two)
check 'the granter passes every case' half_passes one
check 'the grantee reaches the end' half_passes two
check 'fifteen cases passed' on one 'grep "^lender: 15 passed, 0 failed" /tmp/half.log'
on one 'rmmod ringfence-window'
start_half two user $(domain_id one)
start_half one lender $(domain_id two)
check_not 'without the device no case passes' half_passes one
check 'one line says why' on one 'grep "this platform has no windows" /tmp/half.log'
is 'no window is left' "$(dump_windows | grep -c ' window .* to d')" 0
for each in one two; do xl destroy $each; done
check 'the guests leave no zombie' wait_for 30 sh -c '[ $(xl list | wc -l) = 2 ]'
is 'the memory is free again' "$(free_memory)" "$before"
complete_scenario
