# title: a disk with a ring of sixteen pages and requests of 256 segments, in each mode
# set: all
# machine: xen
# limit: 240

# queue_limit FILE: prints a limit of the disk's queue in the guest.
queue_limit() {
    on one "cat /sys/block/xvda/queue/$1" | tr -d '\r\n'
}

# check_mode MODE: checks load with the largest ring and requests in this mode, in a new guest.
check_mode() {
    local before large
    check "$1: configured" reload_daemon '[disks]' "mode = \"$1\"" "paths = [\"$DISKS\"]" 'ring-page-order = 4'
    create_guest_with_disk one one
    is "$1: sixteen ring pages" "$(disk_status_value one ring_pages)" 16
    is "$1: 256 segments a request" "$(queue_limit max_segments)" 256
    before=$(disk_requests) large=$(daemon_counter indirect)
    check "$1: load with requests of up to 1 MiB" run_load one /dev/xvda --seconds 2 --largest 1024 --threads 8 --mebibytes 32
    before=$(($(disk_requests) - before)) large=$(($(daemon_counter indirect) - large))
    note "$1: $before requests, $large of them indirect"
    check "$1: most of them were indirect" test $((2 * large)) -gt $before
    check_not "$1: the guest has nothing to complain of" on one "dmesg | grep -E 'I/O error|BUG|WARNING|disabled for further use'"
    check_not "$1: nothing is charged to it" on dom0 "ringfence status | grep 'rules broken'"
    check_destruction one
}

use_disks
create_image one 48
# The driver sets pages aside for every segment of every request: 512 MiB.
MEMORY=800 EXTRA='xen_blkfront.max_ring_page_order=4 xen_blkfront.max_indirect_segments=256'
check_mode persistent
check_mode map
check_mode copy
complete_scenario
