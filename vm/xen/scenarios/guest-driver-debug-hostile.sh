# title: the checks of `guest-driver-hostile` in a guest whose kernel has KASAN, lockdep and kmemleak
# set: name
# machine: xen-pvh
# limit: 900
# driver: netfront
# kernel: debug

# As a PV guest this kernel ends with a page fault before it has a console.
KERNEL=/boot/vmlinux-debug GUESTS_TYPE=pvh GUESTS_PART=debug GUESTS_MEMORY=512
. /vm/xen/scenarios/guest-driver-hostile.sh
