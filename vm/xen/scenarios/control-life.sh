# title: for comparison: what `life` checks, with the kernel's own xen-netback
# set: all
# machine: xen-netback
# limit: 150

use_netback
two_guests 8
rebinding one 11 2
saving two 12
complete
