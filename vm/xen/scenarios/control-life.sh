# title: for comparison: what `life` checks, with the kernel's own xen-netback
# set: all
# machine: xen-netback
# limit: 150

use_netback
check_two_guests 8
check_rebinding one 11 2
check_save_and_restore two 12
complete_scenario
