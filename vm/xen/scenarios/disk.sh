# title: a disk of an unmodified guest: a file system, no map and no unmap per request, the daemon killed under load
# set: core
# machine: xen
# limit: 90

use_disks
image one 48
with_disk one
check 'its two ends say connected' disk_connected one
filesystem one
check 'load' load_on one /dev/xvda --seconds 2
no_maps 'more load' one /dev/xvda --seconds 2
load_begins one /dev/xvda --seconds 4
sleep 1
check 'the daemon is killed and started' killed_and_started
check 'every sector is as it was written' load_ends one
check 'it was taken over as it was' on dom0 'ringfence status | grep "vbd.*taken over"'
gone one
complete
