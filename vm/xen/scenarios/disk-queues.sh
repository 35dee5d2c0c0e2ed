# title: a disk with four queues of four ring pages, indirect requests: unbound and bound, saved and restored under load
# set: all
# machine: xen
# limit: 180

rebind_disk() {
    on $1 "cd /sys/bus/xen/drivers/vbd && echo vbd-51712 >unbind && test ! -e /dev/xvda &&
        echo vbd-51712 >bind && wait_for 20 test -b /dev/xvda"
}

# start_reader NAME: starts to read the disk without end. Errors while the disk is absent do not matter.
start_reader() {
    on $1 'while :; do dd if=/dev/xvda of=/dev/null bs=256k; usleep 10000; done 2>/dev/null & echo $! >/tmp/reader'
}

use_disks '[disks]' 'ring-page-order = 2' 'max-queues = 4'
create_image one 64
create_four_queue_guest one one
is 'it has four queues' "$(disk_queue_count one)" 4
is 'of four ring pages each' "$(disk_status_value one ring_pages)" 4
is 'its pages stay mapped' "$(disk_status_value one persistent)" true
check_filesystem one
check 'load with large requests' run_load one /dev/xvda --seconds 2 --largest 1024 --threads 4 --mebibytes 32
check 'some of them were indirect' test $(daemon_counter indirect) -gt 10
check_load_costs_no_operation 'more of it' one /dev/xvda --seconds 3 --largest 256 --threads 4 --mebibytes 32
is 'each queue was used' "$(disk_queues_used one)" 4

check_filesystem one
start_reader one
check 'its driver is unbound and bound, while it reads' rebind_disk one
check 'and once more' rebind_disk one
check 'both ends are connected' disk_connected one
is 'with four queues' "$(disk_queue_count one)" 4
check 'the files are as they were' verify_files one
on one 'kill $(cat /tmp/reader); dmesg -c >/dev/null'

start_load one /dev/xvda --seconds 8 --mebibytes 48
sleep 2
check 'it is saved under load, and restored' save_and_restore one
check 'every sector is as it was written' finish_load one
check 'both ends are connected again' disk_connected one
is 'with four queues again' "$(disk_queue_count one)" 4
check_filesystem one
check_not 'the guest has nothing to complain of' on one "dmesg | grep -E 'I/O error|BUG|WARNING|disabled for further use'"
check_not 'nothing is charged to it' on dom0 "ringfence status | grep 'rules broken'"
check_destruction one
complete_scenario
