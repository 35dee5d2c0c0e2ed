# title: our driver unbound and bound under traffic ROUNDS times, against the kernel's own xen-netback
# set: name
# machine: xen-netback
# limit: 900
# driver: netfront

. /vm/xen/driver.sh

ROUNDS=${ROUNDS:-30}
use_netback
VCPUS=2
guests_with tools driver
create_guest_with_our_driver one 11
check_driver_rebinding one 11 $ROUNDS dom0
check_kernel_log one
check_destruction one
complete_scenario
