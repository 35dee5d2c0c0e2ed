# title: the driver unbound and bound again under traffic, save and restore, reboot
# set: core
# machine: xen
# limit: 120

plan 16
use_ringfence
CHANNELS=$(channels)
networked one 11
rebinding one 11 2
saving one 11
check 'the guest is destroyed' xl destroy one
unserved
