# title: two queues
# set: all
# machine: xen
# limit: 90

use_ringfence '[network]' 'max-queues = 2'
VCPUS=2
networked one 11
is 'the guest uses two queues' "$(key /local/domain/$(domain one)/device/vif/0/multi-queue-num-queues)" 2
# A thread and a queue in the bridge for each, as far as there are processors (`cargo xtask vm xen --processors 2`).
processors=$(nproc)
[ $processors -le 2 ] || processors=2
is 'so does its interface in the bridge' "$(ls -d /sys/class/net/vif$(domain one).0/queues/tx-* | wc -l)" $processors
streams one 11 64
complete
