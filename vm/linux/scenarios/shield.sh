# title: disks behind `shield`: file system, ten kills of backends and shields, reboot, firmware; no secret is seen
# set: all
# machine: linux-shield
# limit: 240

. /vm/linux/disk.sh
load_modules virtio_blk ext4 crc32c_generic
# Disks behind a shield, and their PCI addresses.
DISKS='foreign=0000:00:12.0 own=0000:00:13.0'
mount_disk() { mkdir -p /mnt/$DISK && mount -t ext4 /dev/$DISK /mnt/$DISK; }
# check_file_system NAME: checks the file system of the disk and its file `noise`.
check_file_system() {
    check "the file system can be mounted ($1)" mount_disk
    is "its file is as before ($1)" "$(sha256sum </mnt/$DISK/noise)" "$(cat /share/$1.sum)"
    check "it is unmounted ($1)" umount /mnt/$DISK
    check "it is whole ($1)" fsck.ext4 -f -n /dev/$DISK
}
# reads_file: reads that file anew, and compares.
reads_file() {
    echo 3 >/proc/sys/vm/drop_caches
    test "$(sha256sum </mnt/$DISK/noise)" = "$(cat /share/$name.sum)"
}

if [ -z "$REBOOTED" ]; then
    for each in $DISKS; do
        name=${each%%=*}
        use_disk ${each#*=}
        check "it stores data ($name)" stores_data
        check "a file system is made ($name)" mkfs.ext4 -q /dev/$DISK
        check "it is mounted ($name)" mount_disk
        dd if=/dev/urandom of=/mnt/$DISK/noise bs=64k count=64 2>/dev/null
        dd if=/dev/zero of=/mnt/$DISK/load bs=64k count=128 conv=fsync 2>/dev/null
        sha256sum </mnt/$DISK/noise >/share/$name.sum
        check_kills "the backend ($name)" $name /mnt/$DISK/load
        check_kills "the shield ($name)" $name-shield /mnt/$DISK/load
        check "it is unmounted after that ($name)" umount /mnt/$DISK
        check_file_system $name
    done
    hide_secret
    use_disk 0000:00:14.0
    check_seen 'a backend without a shield' "$(scan direct stores_data)"
    for each in $DISKS; do
        name=${each%%=*}
        use_disk ${each#*=}
        check "it is mounted again ($name)" mount_disk
        check_unseen "the backend behind the shield ($name)" "$(scan $name reads_file)"
        check_seen "the shield, which is trusted ($name)" "$(scan $name-shield reads_file)"
    done
    boots=$(on_host boot firmware)
    is 'firmware boots off a disk behind a shield, and the machine restarts' "$(echo $boots)" 'boot 1 boot 2 boot 3'
    check_not 'the kernel has no complaint' sh -c 'dmesg | grep "WARNING:\|BUG:\|Oops\|I/O error"'
    # Both file systems are in use.
    reboot_machine
fi
for each in $DISKS; do
    name=${each%%=*}
    use_disk ${each#*=}
    check_file_system $name
    check "it stores data after the reboot ($name)" stores_data
done
check_not 'the kernel has no complaint after the reboot' sh -c 'dmesg | grep "WARNING:\|BUG:\|Oops\|I/O error"'
complete_scenario
