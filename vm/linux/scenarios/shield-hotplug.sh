# title: a disk behind `shield` is plugged in and out while the machine runs, and has its data when it returns
# set: all
# machine: linux-shield
# limit: 90

. /vm/linux/disk.sh
load_modules virtio_blk
check_hotplug
complete_scenario
