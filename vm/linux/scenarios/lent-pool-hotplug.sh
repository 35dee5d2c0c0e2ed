# title: a disk on `vhost-user blk --require-pool` by the module lent-pool is plugged in and out, and has its data when it returns
# set: all
# machine: linux-lent-pool
# driver: lent-pool
# limit: 90

. /vm/linux/disk.sh
check 'the module loads' insmod /lib/ringfence-lent-pool.ko pools=0000:00:10.0
load_modules virtio_blk
check_hotplug iommu_platform=true disable-legacy=on
is 'it lends by DMA operations' "$(disk_feature 33)" 1
complete_scenario
