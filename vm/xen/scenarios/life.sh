# title: the driver unbound and bound again under traffic, save and restore
# set: core
# machine: xen
# limit: 120

use_ringfence
create_networked_guest one 11
check_rebinding one 11 2
check_save_and_restore one 11
check_destruction one
complete_scenario
