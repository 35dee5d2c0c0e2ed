# title: a disk of an unmodified guest: a file system, no map and no unmap per request, the daemon killed under load
# set: core
# machine: xen
# limit: 90

use_disks
create_image one 48
create_guest_with_disk one one
check 'its two ends say connected' disk_connected one
check_filesystem one
check 'load' run_load one /dev/xvda --seconds 2
check_load_costs_no_operation 'more load' one /dev/xvda --seconds 2
start_load one /dev/xvda --seconds 4
sleep 1
check 'the daemon is killed and started' restart_daemon
check 'every sector is as it was written' finish_load one
check 'it was taken over as it was' on dom0 'ringfence status | grep "vbd.*taken over"'
check_destruction one
complete_scenario
