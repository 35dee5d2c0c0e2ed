# title: our driver in a guest, against the kernel's own xen-netback, and against `serve` without staging
# set: all
# machine: xen-netback
# limit: 240
# driver: netfront

. /vm/xen/driver.sh

use_netback
VCPUS=2
guests_with tools driver
create_guest_with_our_driver one 11
check_pings one
check_streams one 11 16
is 'nothing is staged' "$(driver_counter one staged_pages)" 0
check 'hashing is set' on one 'ethtool -X eth0 equal 1'
check_transfer 'hashed: dom0 to one' dom0 one 10.77.0.11 8
check_driver_rebinding one 11 3 dom0
check_kernel_log one
check_destruction one

rmmod xen_netback
ip link delete xenbr0
VCPUS=1
use_ringfence
create_guest_with_our_driver two 12
check_streams two 12 8
check_kernel_log two
check_destruction two
complete_scenario
