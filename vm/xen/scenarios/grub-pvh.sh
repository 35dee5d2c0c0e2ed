# title: GRUB as the kernel of a PVH guest: reads Linux from a disk of `serve`, and hands over to it
# group: foreign
# set: all
# machine: xen-pvh
# limit: 240
# parts: grub

. /vm/xen/foreign.sh

use_disks
check 'an image with a packed Linux kernel' grub_image pvh /boot/vmlinuz
MEMORY=256 GUESTS_TYPE=pvh
grub_boots pvh grub-i386-xen_pvh.bin "disk=[$(disk xvda pvh)]"
gone pvh
complete
