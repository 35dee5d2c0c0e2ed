# title: fio verifies a disk while its guest is saved and restored; guests are destroyed under fio
# set: all
# machine: xen
# limit: 300
# parts: fio

# fio_begins NAME LOOPS: fio writes all of xvda that many times, at random and in requests of many sizes, and compares
# what it wrote, beside other things. Some of its writes are done when this returns.
fio_begins() {
    on $1 "rm -f /tmp/fio*; { fio --name=verify --filename=/dev/xvda --size=16m --loops=$2 --direct=1 --thread \
        --ioengine=libaio --iodepth=16 --rw=randwrite --bsrange=4k-256k --verify=crc32c --verify_fatal=1 \
        --verify_backlog=32 >/tmp/fio.log 2>&1; echo \$? >/tmp/fio.status; } &"
    writes $1 50
}

# writes NAME COUNT: its xvda had more writes than that many.
writes() {
    on $1 "enough() { read -r _ _ _ _ writes _ </sys/block/xvda/stat && [ \$writes -gt $2 ]; }; wait_for 30 enough"
}

# fio_ends NAME: fio came to its end and found every block as it was written.
fio_ends() {
    ON_LIMIT=200 on $1 'wait_for 190 test -s /tmp/fio.status; tail -n 9 /tmp/fio.log; exit $(cat /tmp/fio.status)'
}

# goes_on NAME: fio has not ended, and its disk has more writes.
goes_on() {
    local before=$(on $1 'read -r _ _ _ _ writes _ </sys/block/xvda/stat; echo $writes' | tr -d '\r')
    writes $1 $before && on $1 'test ! -e /tmp/fio.status'
}

# destroyed_under_fio NAME: 2 checks.
destroyed_under_fio() {
    check "$1: fio" fio_begins $1 50
    check "$1: destroyed under fio, and nothing of it stays" destroyed $1 $(domain $1)
}

use_disks '[disks]' 'ring-page-order = 2' 'max-queues = 4'
guests_with tools fio
# The file of a saved guest is in the memory of dom0. The guest's root file system takes as much of its memory as it needs.
MEMORY=352 EXTRA=rootfstype=ramfs
rm -f /boot/fio.cpio
image one 16
image beside 16
with_disk beside
check 'a guest beside: fio' fio_begins beside 4
with_disk one
check 'one: fio' fio_begins one 6
check 'one is saved under fio, and restored' saved_and_restored one
check 'fio goes on' goes_on one
check 'one is saved and restored once more' saved_and_restored one
check 'fio found every block of one as it was written' fio_ends one
check 'both ends of its disk are connected' disk_connected one
destroyed_under_fio one

IMAGE=one
with_disk two
check 'two, with the same disk: fio' fio_begins two 1
check 'fio found every block of two as it was written' fio_ends two
destroyed_under_fio two
check 'fio found every block of the guest beside as it was written' fio_ends beside
check_not 'that guest has nothing to complain of' on beside "dmesg | grep -E 'I/O error|BUG|WARNING|disabled for further use'"
gone beside
complete
