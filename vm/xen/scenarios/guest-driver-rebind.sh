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
driven one 11
rebound one 11 $ROUNDS
healthy one
gone one
complete
