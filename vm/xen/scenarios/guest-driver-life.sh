# title: our driver in a guest that is saved and restored, with staged pages
# set: all
# machine: xen
# limit: 90
# driver: netfront

. /vm/xen/staging.sh
. /vm/xen/driver.sh

use_ringfence '[network]' 'mode = "staging"'
guests_with driver
# The saved guest has to fit dom0's memory.
MEMORY=160
create_guest_with_our_driver one 11
check 'the pages are staged' wait_for 40 has_staged one 512
check_transfer 'dom0 to one' dom0 one 10.77.0.11 8
check_save_and_restore one 11
check 'the pages are staged after restoring' wait_for 40 has_staged one 512
check_transfer 'dom0 to one, after restoring' dom0 one 10.77.0.11 8
check_kernel_log one
check_destruction one
complete_scenario
