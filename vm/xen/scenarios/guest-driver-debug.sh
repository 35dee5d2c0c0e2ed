# title: the checks of `guest-driver` in a guest whose kernel has KASAN, lockdep and kmemleak
# set: all
# machine: xen
# limit: 900
# driver: netfront
# kernel: debug

KERNEL=/boot/vmlinux-debug GUESTS_PART=debug GUESTS_MEMORY=512
. /vm/xen/scenarios/guest-driver.sh
