# title: a PVH guest
# set: all
# machine: xen-pvh
# limit: 90

use_ringfence
check 'a PVH guest is created' create_guest one 'type="pvh"' "$(vif_line 11)" || give_up 'nothing to see'
check 'it has a network' start_network one 11
is 'it is PVH' "$(on one cat /sys/hypervisor/guest_type)" PVH
check_streams one 11 8
check 'its two ends say connected' vif_connected one
complete_scenario
