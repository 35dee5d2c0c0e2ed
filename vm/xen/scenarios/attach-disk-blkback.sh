# title: `ringfence attach --disk` in a guest, served by the kernel's own xen-blkback
# set: all
# machine: xen-netback
# limit: 200
# parts: fio

mkdir -p $DISKS && mount -t tmpfs disks $DISKS
guests_with tools fio
MEMORY=352
check 'the kernel has xen-blkback' modprobe xen-blkback
create_image one 16
head -c 16777216 /dev/urandom >$DISKS/other
check 'dom0 has block devices' sh -c "modprobe loop && losetup /dev/loop0 $DISKS/one && losetup /dev/loop1 $DISKS/other"
line() { echo "'vdev=$1,format=raw,backendtype=phy,script=block-control,target=$2'"; }
check 'a guest with two disks is created' create_guest one "disk=[$(line xvda /dev/loop0),$(line xvdb /dev/loop1)]" ||
    give_up "$(tail -n 3 /var/log/xen/*.log)"
check 'it has the first disk' has_disk one xvda
check 'and the second' on one 'wait_for 20 test -b /dev/xvdb'
check_attached_disk one $DISKS/other
check 'the guest is destroyed' xl destroy one
complete_scenario
