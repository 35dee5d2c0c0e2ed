# title: GRUB as the kernel of a PV guest: reads Linux from a disk of `serve`, and hands over to it
# group: foreign
# set: all
# machine: xen
# limit: 240
# parts: grub

. /vm/xen/foreign.sh

use_disks
kernel=$(kernel_for_pv_grub)
check "an image with Linux ($kernel)" create_grub_image pv $kernel
MEMORY=256
check_grub_boots pv grub-x86_64-xen.bin "disk=[$(disk_line xvda pv)]"
check_destruction pv
complete_scenario
