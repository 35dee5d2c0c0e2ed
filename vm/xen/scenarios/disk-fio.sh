# title: fio verifies a disk while its guest is saved and restored; guests are destroyed under fio
# set: all
# machine: xen
# limit: 300
# parts: fio

# start_fio NAME LOOPS: starts fio, which writes all of xvda that many times, at random and in requests of many sizes,
# and compares it. Returns after some of the writes.
start_fio() {
    on $1 "rm -f /tmp/fio*; { fio --name=verify --filename=/dev/xvda --size=16m --loops=$2 --direct=1 --thread \
        --ioengine=libaio --iodepth=16 --rw=randwrite --bsrange=4k-256k --verify=crc32c --verify_fatal=1 \
        --verify_backlog=32 >/tmp/fio.log 2>&1; echo \$? >/tmp/fio.status; } &"
    has_written $1 50
}

# has_written NAME COUNT: waits until the guest's xvda had more than COUNT writes.
has_written() {
    on $1 "enough() { read -r _ _ _ _ writes _ </sys/block/xvda/stat && [ \$writes -gt $2 ]; }; wait_for 30 enough"
}

# finish_fio NAME: waits for the end of fio, and succeeds if it found every block as it was written.
finish_fio() {
    ON_LIMIT=200 on $1 'wait_for 190 test -s /tmp/fio.status; tail -n 9 /tmp/fio.log; exit $(cat /tmp/fio.status)'
}

# fio_continues NAME: succeeds if fio has not ended and its disk gets more writes.
fio_continues() {
    local before=$(on $1 'read -r _ _ _ _ writes _ </sys/block/xvda/stat; echo $writes' | tr -d '\r')
    has_written $1 $before && on $1 'test ! -e /tmp/fio.status'
}

# check_destruction_under_fio NAME: checks that a guest is destroyed under fio, and that nothing of it is left.
check_destruction_under_fio() {
    check "$1: fio" start_fio $1 50
    check "$1: destroyed under fio, and nothing of it stays" destroy_guest $1 $(domain_id $1)
}

use_disks '[disks]' 'ring-page-order = 2' 'max-queues = 4'
guests_with tools fio
# The file of a saved guest is in the memory of dom0.
MEMORY=352
rm -f /boot/fio.cpio
create_image one 16
create_image beside 16
create_guest_with_disk beside beside
check 'a guest beside: fio' start_fio beside 4
create_guest_with_disk one one
check 'one: fio' start_fio one 6
check 'one is saved under fio, and restored' save_and_restore one
check 'fio goes on' fio_continues one
check 'one is saved and restored once more' save_and_restore one
check 'fio found every block of one as it was written' finish_fio one
check 'both ends of its disk are connected' disk_connected one
check_destruction_under_fio one

create_guest_with_disk two one
check 'two, with the same disk: fio' start_fio two 1
check 'fio found every block of two as it was written' finish_fio two
check_destruction_under_fio two
check 'fio found every block of the guest beside as it was written' finish_fio beside
check_not 'that guest has nothing to complain of' on beside "dmesg | grep -E 'I/O error|BUG|WARNING|disabled for further use'"
check_destruction beside
complete_scenario
