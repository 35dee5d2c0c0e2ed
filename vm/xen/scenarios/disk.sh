# title: a disk of an unmodified guest: a file system, persistent grants, the daemon killed under load
# set: all
# machine: xen
# limit: 90

plan 14
use_disks
image one 48
with_disk one
check 'its two ends say connected' disk_connected one
filesystem one
check 'load' load_on one /dev/xvda --seconds 2
before="$(disk_counter grant_maps) $(disk_counter grant_unmaps)"
check 'more load' load_on one /dev/xvda --seconds 3
note "requests: $(disk_counter reads) reads, $(disk_counter writes) writes, $(disk_counter persistent_hits) look-ups that hit"
is 'maps and unmaps of it' "$(disk_counter grant_maps) $(disk_counter grant_unmaps)" "$before"
load_begins one /dev/xvda --seconds 6
sleep 1
check 'the daemon is killed and started' killed_and_started
check 'every sector is as it was written' load_ends one
check 'it was taken over as it was' on dom0 'ringfence status | grep "vbd.*taken over"'
check 'nothing of it stays' destroyed one $(domain one)
