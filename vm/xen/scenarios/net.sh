# title: an unmodified guest served by `ringfence serve`: packets of all sizes, TCP both ways
# set: core
# machine: xen
# limit: 90

use_ringfence
check_one_guest 64
check 'its two ends say connected' vif_connected one
check 'ringfence status knows it' on dom0 'ringfence status | grep -q "vif$(domain_id one).0"'
complete_scenario
