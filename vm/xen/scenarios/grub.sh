# title: GRUB as the kernel of a PV guest: reads Linux from a disk of `serve`, and hands over to it
# group: foreign
# set: all
# machine: xen
# limit: 240
# parts: grub

. /vm/xen/foreign.sh

plan 8
use_disks
check 'an image with a packed Linux kernel' grub_image pv /boot/vmlinuz
MEMORY=256
grub_boots pv grub-x86_64-xen.bin "disk=[$(disk xvda pv)]"
gone pv
