# title: two queues
# set: all
# machine: xen
# limit: 90

plan 10
use_ringfence '[network]' 'max-queues = 2'
VCPUS=2
networked one 11
is 'the guest uses two queues' "$(key /local/domain/$(domain one)/device/vif/0/multi-queue-num-queues)" 2
streams one 11 64
