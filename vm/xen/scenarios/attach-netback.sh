# title: `ringfence attach` in a guest, served by the kernel's own xen-netback
# set: all
# machine: xen-netback
# limit: 60

use_netback
check_attach
check_destruction one
complete_scenario
