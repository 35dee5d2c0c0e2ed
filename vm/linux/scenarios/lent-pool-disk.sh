# title: a disk on `vhost-user blk --require-pool` by the module lent-pool: data survive ten kills of its process
# set: core
# machine: linux-lent-pool
# driver: lent-pool
# limit: 120

. /vm/linux/disk.sh

check 'the module loads' insmod /lib/ringfence-lent-pool.ko pools=0000:00:10.0
load_modules virtio_blk
use_disk 0000:00:12.0
is 'it lends by DMA operations' "$(disk_feature 33)" 1
is 'it offers several queues' "$(disk_feature 12)" 1
check 'it stores data' stores_data
check_kills 'its process' disk /dev/$DISK
check 'it stores data again' stores_data
check_not 'the kernel has no complaint' sh -c 'dmesg | grep "WARNING:\|BUG:\|Oops\|I/O error"'
complete_scenario
