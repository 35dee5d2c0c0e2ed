# title: the platform conforms between dom0 and a PVH guest, both ways
# set: all
# machine: xen-pvh
# limit: 100
# grants: bad

. /vm/xen/conformance.sh

check 'a guest is created' create_guest peer 'type="pvh"' || give_up 'without a guest there is nothing to see'
check 'it takes commands' guest_ready peer || give_up 'a guest that does not answer shows nothing'
check_both_halves peer
is 'nothing of it is mapped any more' "$(grants_in_use $(domain_id peer))" ''
complete_scenario
