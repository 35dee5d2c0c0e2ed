# title: the checks of `guest-driver` in a guest whose kernel has KASAN, lockdep and kmemleak
# set: name
# machine: xen-pvh
# limit: 900
# driver: netfront
# kernel: debug

# As a PV guest this kernel ends with a page fault before it has a console.
KERNEL=/boot/vmlinux-debug GUESTS_TYPE=pvh GUESTS_PART=debug GUESTS_MEMORY=512
# With two virtual processors on one, each waits for locks of the other while it does not run. The driver has two queues.
GUESTS_VCPUS=1 EXTRA=DRIVER_OPTIONS=max_queues=2
# A mebibyte takes this kernel nine seconds here.
GUESTS_MEBIBYTES=2
. /vm/xen/scenarios/guest-driver.sh
