# title: a disk on `vhost-user blk --require-pool` by the module lent-pool: data survive ten kills of its process
# set: core
# machine: linux-lent-pool
# driver: lent-pool
# limit: 120

. /vm/linux/passt.sh
driver=/lib/ringfence-lent-pool.ko
# sum: prints the hash of the first 32 MiB of the disk, which the kernel reads anew.
sum() {
    echo 3 >/proc/sys/vm/drop_caches
    dd if=/dev/vda bs=1M count=32 2>/dev/null | sha256sum | cut -d ' ' -f 1
}
# noise: writes 32 MiB of noise, and leaves its hash in /tmp/sum.
noise() {
    dd if=/dev/urandom bs=1M count=32 2>/dev/null >/tmp/noise
    sha256sum </tmp/noise | cut -d ' ' -f 1 >/tmp/sum
    dd if=/tmp/noise of=/dev/vda bs=64k conv=fsync 2>/dev/null
}

check 'the module loads' insmod $driver pools=0000:00:10.0
load_modules virtio_blk
check 'the disk is there' wait_for 10 test -b /dev/vda || give_up 'no disk'
is 'it has its size' "$(cat /sys/block/vda/size)" 131072
is 'it lends by DMA operations' "$(cut -c 34 /sys/block/vda/device/features)" 1
is 'it offers several queues' "$(cut -c 13 /sys/block/vda/device/features)" 1
check 'it stores data' noise
is 'and returns them' "$(sum)" "$(cat /tmp/sum)"
touch /share/kill-disk
while ! test -e /share/disk-was-killed; do
    noise || break
done
check 'its process was killed ten times under load' wait_for 30 test -e /share/disk-was-killed
check 'it stores data again' noise
is 'and returns them again' "$(sum)" "$(cat /tmp/sum)"
check_not 'the kernel has no complaint' sh -c 'dmesg | grep "WARNING:\|BUG:\|Oops\|I/O error"'
complete_scenario
