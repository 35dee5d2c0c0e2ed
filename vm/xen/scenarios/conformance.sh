# title: the platform conforms between dom0 and a guest, both ways; a dead guest leaves nothing behind
# set: core
# machine: xen
# limit: 100
# grants: bad

. /vm/xen/conformance.sh

check 'a guest is created' create_guest peer || give_up 'without a guest there is nothing to see'
check 'it takes commands' guest_ready peer || give_up 'a guest that does not answer shows nothing'
peer_id=$(domain_id peer)
check_both_halves peer
is 'nothing of it is mapped any more' "$(grants_in_use $peer_id)" ''

# A page is mapped, and its owner destroyed.
on peer 'ringfence-bench internal conformance --role lender --peer 0 --hold page >/tmp/hold.log 2>&1 &'
ringfence-bench internal conformance --role user --peer $peer_id --hold page >/tmp/hold.log 2>&1 &
holder=$!
check 'dom0 maps a page of it' wait_for 20 grep holding /tmp/hold.log
check 'the hypervisor knows of that' test -n "$(grants_in_use $peer_id)"
check 'the guest is destroyed' xl destroy peer
check 'it is kept by what is mapped' domain_exists $peer_id
kill -9 $holder
check 'once the user is dead, it goes' wait_for 20 domain_is_gone $peer_id
is 'no page of it is mapped' "$(grants_in_use $peer_id)" ''
is 'no event channel leads to it' "$(channels_to $peer_id)" ''
complete_scenario
