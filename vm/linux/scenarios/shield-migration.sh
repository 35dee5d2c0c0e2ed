# title: a machine migrates while a disk behind `shield` is in use: what the backend wrote to its memory is there
# set: all
# machine: linux-shield-migration
# limit: 180

. /vm/linux/disk.sh
load_modules virtio_blk ext4 crc32c_generic
# Sectors behind the file system, by which the machine and its host tell each other how far they are (migrate.py).
READY=131071 MOVED=131070

# has_moved: succeeds once the machine has migrated.
has_moved() { moved | grep -q '^moved'; }
# moved: prints what the host wrote, which no cache of the disk has.
moved() {
    blockdev --flushbufs /dev/$DISK
    dd if=/dev/$DISK bs=512 skip=$MOVED count=1 2>/dev/null
}

use_disk 0000:00:12.0
check 'a file system is made' mkfs.ext4 -q /dev/$DISK 60M
mkdir -p /mnt/disk
check 'it is mounted' mount -t ext4 /dev/$DISK /mnt/disk
dd if=/dev/urandom of=/mnt/disk/noise bs=64k count=384 2>/dev/null
dd if=/dev/zero of=/mnt/disk/load bs=64k count=128 conv=fsync 2>/dev/null
sum=$(sha256sum </mnt/disk/noise)
echo 3 >/proc/sys/vm/drop_caches
check_not 'the machine has not migrated yet' has_moved
# Each round writes, and compares every sector.
(
    while [ ! -e /tmp/moved ]; do
        traffic load /mnt/disk/load --mebibytes 8 --seconds 1 --threads 2 >/tmp/load.out 2>&1 || exit
    done
) &
load=$!
check 'the host is told' sh -c "printf ready | dd of=/dev/$DISK bs=512 seek=$READY conv=sync,fsync 2>/dev/null"
# The page cache keeps what is read. The backend writes it, so no processor of the machine marks those pages.
blocks=0
until has_moved || [ $blocks -ge 384 ]; do
    dd if=/mnt/disk/noise bs=64k skip=$blocks count=1 of=/dev/null 2>/dev/null
    blocks=$((blocks + 1))
done
check 'the machine has migrated' wait_for 60 has_moved || give_up 'nothing to compare'
note "$(moved | head -n 1)"
note "$blocks parts of 64 KiB were read meanwhile"
check 'parts were read meanwhile' test $blocks -ge 16
is 'what was read meanwhile is in memory' "$(sha256sum </mnt/disk/noise)" "$sum"
touch /tmp/moved
check 'the load has found what it wrote' wait $load
echo 3 >/proc/sys/vm/drop_caches
is 'what is read from now on is right' "$(sha256sum </mnt/disk/noise)" "$sum"
check 'the load goes on' traffic load /mnt/disk/load --mebibytes 8 --seconds 2 --threads 2
check 'the file system is unmounted' umount /mnt/disk
check 'it is whole' fsck.ext4 -f -n /dev/$DISK
check 'the disk stores data' stores_data
check_not 'the kernel has no complaint' sh -c 'dmesg | grep "WARNING:\|BUG:\|Oops\|I/O error"'
complete_scenario
