# title: GRUB as the kernel of a PVH guest: reads Linux from a disk of `serve`, and hands over to it
# group: foreign
# set: all
# machine: xen-pvh
# limit: 240
# parts: grub

. /vm/xen/foreign.sh

use_disks
check 'an image with a packed Linux kernel' create_grub_image pvh /boot/vmlinuz
MEMORY=256 GUESTS_TYPE=pvh
check_grub_boots pvh grub-i386-xen_pvh.bin "disk=[$(disk_line xvda pvh)]"
check_destruction pvh
complete_scenario
