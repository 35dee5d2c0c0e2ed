# title: `ringfence attach` in a guest, served by `ringfence serve`
# set: core
# machine: xen
# limit: 60

use_ringfence
check_attach
check_destruction one
complete_scenario
