# title: the guest's pages are mapped instead of copied
# set: core
# machine: xen
# limit: 60

plan 10
use_ringfence '[network]' 'mode = "map"'
networked one 11
check 'ringfence status says so' on dom0 'ringfence status | grep -q map'
streams one 11 8
