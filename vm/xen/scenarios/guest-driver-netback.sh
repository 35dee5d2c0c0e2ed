# title: our driver in a guest, against the kernel's own xen-netback, and against `serve` without staging
# set: all
# machine: xen-netback
# limit: 240
# driver: netfront

. /vm/xen/driver.sh

use_netback
VCPUS=2
guests_with tools driver
driven one 11
pings one
streams one 11 16
is 'nothing is staged' "$(counter one staged_pages)" 0
check 'hashing is set' on one 'ethtool -X eth0 equal 1'
transfer 'hashed: dom0 to one' dom0 one 10.77.0.11 8
rebound one 11 3
healthy one
gone one

rmmod xen_netback
ip link delete xenbr0
VCPUS=1
use_ringfence
driven two 12
streams two 12 8
healthy two
gone two
complete
