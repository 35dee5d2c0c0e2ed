# title: a disk of qemu-storage-daemon behind `pool-proxy` by the module lent-pool: it stores data, sees no secret, and returns
# set: all
# machine: linux-lent-pool
# driver: lent-pool
# limit: 120

. /vm/linux/passt.sh
driver=/lib/ringfence-lent-pool.ko
disk=0000:00:13.0
# block_of ADDRESS: prints the name of the disk at a PCI address.
block_of() { ls "$(echo /sys/bus/pci/devices/$1/virtio*/block)"; }
# sum: prints the hash of the first 16 MiB of the disk, which the kernel reads anew.
sum() {
    echo 3 >/proc/sys/vm/drop_caches
    dd if=/dev/$name bs=1M count=16 2>/dev/null | sha256sum | cut -d ' ' -f 1
}
# noise: writes 16 MiB of noise, and leaves its hash in /tmp/sum.
noise() {
    dd if=/dev/urandom bs=1M count=16 2>/dev/null >/tmp/noise
    sha256sum </tmp/noise | cut -d ' ' -f 1 >/tmp/sum
    dd if=/tmp/noise of=/dev/$name bs=64k conv=fsync 2>/dev/null
}
# stores_data: writes to the disk, and compares.
stores_data() { noise && test "$(sum)" = "$(cat /tmp/sum)"; }
# returns_after_death_of NAME: has the host kill a process while no request is under way, and uses the disk again.
returns_after_death_of() {
    echo "$1" >/share/kill.new && mv /share/kill.new /share/kill
    wait_for 10 sh -c '! test -e /share/kill' && stores_data
}

check 'the module loads' insmod $driver pools=0000:00:10.0
load_modules virtio_blk
check 'the disk is there' wait_for 10 block_of $disk || give_up 'no disk'
name=$(block_of $disk)
is 'it has its size' "$(cat /sys/block/$name/size)" 131072
is 'the proxy adds DMA operations' "$(cut -c 34 /sys/block/$name/device/features)" 1
check 'it stores data' stores_data
check 'the proxy says what it lends' grep 'the backend is lent 64 MiB' /share/proxy.log
check_card
scan_passt >/dev/null
check 'the backend was searched' wait_for 60 test -e /share/foreign/scanned
found=$(cat /share/foreign/scanned)
note "$found"
is 'it sees no secret of the machine' "$(echo "$found" | cut -d ' ' -f 1-2)" 'hits 0'
check 'but the pool' test "$(echo "$found" | cut -d ' ' -f 6)" -gt 0
check 'it returns after the backend was killed' returns_after_death_of foreign
check 'and after the proxy was killed' returns_after_death_of proxy
check_not 'the kernel has no complaint' sh -c 'dmesg | grep "WARNING:\|BUG:\|Oops\|I/O error"'
complete_scenario
