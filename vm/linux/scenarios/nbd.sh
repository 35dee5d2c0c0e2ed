# title: a disk of `ringfence run` is a node below /dev, with a file system on it
# set: core
# machine: linux
# limit: 120

load_modules nbd crc32c_generic ext4 loop
truncate -s 64M /tmp/disk.img

# In the guest: a file system on the device, checked, and found by name.
cat >/tmp/make.sh <<'END'
set -e
test -b "$RINGFENCE_DISK0_DEVICE"
test -S "$RINGFENCE_DISK0"
echo "device $RINGFENCE_DISK0_DEVICE"
mkfs.ext4 -q "$RINGFENCE_DISK0_DEVICE"
fsck.ext4 -f -n "$RINGFENCE_DISK0_DEVICE"
dd if=/dev/urandom of=/tmp/noise bs=1M count=4 2>/dev/null
dd if=/tmp/noise of="$RINGFENCE_DISK0_DEVICE" bs=1M seek=48 conv=notrunc 2>/dev/null
END
chmod +x /tmp/make.sh
check 'a guest makes a file system on its device' \
    sh -c 'ringfence run --disk /tmp/disk.img -- sh /tmp/make.sh >/tmp/made 2>&1'
check 'it was told which device' grep -q '^device /dev/nbd0$' /tmp/made
check 'the device is given back' test ! -e /sys/block/nbd0/pid
# Data that the guest's kernel still had in memory when the command ended is on the disk.
dd if=/tmp/disk.img of=/tmp/back bs=1M skip=48 count=4 2>/dev/null
check 'the disk holds what was written' cmp /tmp/noise /tmp/back
check 'the file system is whole' fsck.ext4 -f -n /tmp/disk.img
mkdir -p /tmp/mnt
check 'it can be mounted' sh -c 'losetup /dev/loop7 /tmp/disk.img && mount /dev/loop7 /tmp/mnt && umount /tmp/mnt; r=$?; losetup -d /dev/loop7; exit $r'

# Two disks are two devices, one of them read-only.
truncate -s 1M /tmp/other.img
check 'two disks are two devices' ringfence run --disk /tmp/disk.img,ro --disk /tmp/other.img -- sh -c '
    test "$(cat /sys/block/${RINGFENCE_DISK0_DEVICE##*/}/ro)" = 1 &&
    test "$(cat /sys/block/${RINGFENCE_DISK1_DEVICE##*/}/size)" = 2048'

# Whatever becomes of the launcher, the device ends with it.
ringfence run --disk /tmp/disk.img -- sleep 100 >/dev/null 2>&1 &
launcher=$!
for i in $(seq 100); do test -e /sys/block/nbd0/pid && break; sleep 0.1; done
check 'a guest has its device' test -e /sys/block/nbd0/pid
kill -9 $launcher
for i in $(seq 100); do test -e /sys/block/nbd0/pid || break; sleep 0.1; done
check 'it ends with a launcher that is killed' test ! -e /sys/block/nbd0/pid
complete_scenario
