# title: for comparison: what `net` checks, with the kernel's own xen-netback
# set: all
# machine: xen-netback
# limit: 120

use_netback
check_one_guest 64
complete_scenario
