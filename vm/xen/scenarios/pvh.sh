# title: a PVH guest
# set: all
# machine: xen-pvh
# limit: 90

use_ringfence
check 'a PVH guest is created' guest one 'type="pvh"' "$(vif 11)" || give_up 'nothing to see'
check 'it has a network' ready_with_address one 11
is 'it is PVH' "$(on one cat /sys/hypervisor/guest_type)" PVH
streams one 11 8
check 'its two ends say connected' connected one
complete
