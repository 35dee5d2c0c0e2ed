# title: the driver unbound and bound again under traffic, save and restore
# set: core
# machine: xen
# limit: 120

use_ringfence
networked one 11
rebinding one 11 2
saving one 11
gone one
complete
