# title: two guests of `ringfence serve` talk to each other and to dom0
# set: core
# machine: xen
# limit: 60

use_ringfence
check_two_guests 8
complete_scenario
