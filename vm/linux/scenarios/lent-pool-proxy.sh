# title: a disk of qemu-storage-daemon behind `pool-proxy` by the module lent-pool: it stores data, sees no secret, and returns
# set: all
# machine: linux-lent-pool
# driver: lent-pool
# limit: 120

. /vm/linux/disk.sh
# returns_after_death_of NAME: has the host kill a process while no request is under way, and uses the disk again.
returns_after_death_of() { on_host kill $1 && stores_data; }

check 'the module loads' insmod /lib/ringfence-lent-pool.ko pools=0000:00:10.0
load_modules virtio_blk
use_disk 0000:00:13.0
is 'the proxy adds DMA operations' "$(disk_feature 33)" 1
check 'it stores data' stores_data
check 'the proxy says what it lends' grep 'the backend is lent 64 MiB' /share/proxy.log
hide_secret
found=$(scan foreign stores_data)
check_unseen 'the backend' "$found"
check 'it sees the pool' test "$(echo "$found" | cut -d ' ' -f 6)" -gt 0
check 'it returns after the backend was killed' returns_after_death_of foreign
check 'and after the proxy was killed' returns_after_death_of proxy
check_not 'the kernel has no complaint' sh -c 'dmesg | grep "WARNING:\|BUG:\|Oops\|I/O error"'
complete_scenario
