# title: GRUB as the kernel of a PV guest: reads Linux from a disk of `serve`, as an ELF file and packed, and hands over to it
# group: foreign
# set: all
# machine: xen
# limit: 240
# parts: grub

. /vm/xen/foreign.sh

plan 14
use_disks
check 'an image with a Linux kernel as an ELF file' grub_image elf /boot/vmlinux
MEMORY=256
grub_boots elf grub-x86_64-xen.bin "disk=[$(disk xvda elf)]"
gone elf
rm $DISKS/elf
check 'an image with a packed Linux kernel' grub_image packed /boot/vmlinuz
grub_boots packed grub-x86_64-xen.bin "disk=[$(disk xvda packed)]"
gone packed
