# title: the platform conforms between dom0 and a guest, both ways; a dead guest leaves nothing behind
# set: core
# machine: xen
# limit: 100
# grants: bad

. /vm/xen/conformance.sh

check 'a guest is created' guest peer || give_up 'without a guest there is nothing to see'
check 'it takes commands' guest_ready peer || give_up 'a guest that does not answer shows nothing'
D=$(domain peer)
both_halves peer
is 'nothing of it is mapped any more' "$(grants_in_use $D)" ''

# A page is mapped, and its owner destroyed.
on peer 'ringfence-bench internal conformance --role lender --peer 0 --hold page >/tmp/hold.log 2>&1 &'
ringfence-bench internal conformance --role user --peer $D --hold page >/tmp/hold.log 2>&1 &
HOLDER=$!
check 'dom0 maps a page of it' wait_for 20 grep holding /tmp/hold.log
check 'the hypervisor knows of that' test -n "$(grants_in_use $D)"
check 'the guest is destroyed' xl destroy peer
check 'it is kept by what is mapped' is_there $D
kill -9 $HOLDER
check 'once the user is dead, it goes' wait_for 20 is_not_there $D
is 'no page of it is mapped' "$(grants_in_use $D)" ''
is 'no event channel leads to it' "$(channels_to $D)" ''
complete
