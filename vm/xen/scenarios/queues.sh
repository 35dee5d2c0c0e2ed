# title: two queues
# set: all
# machine: xen
# limit: 90

use_ringfence '[network]' 'max-queues = 2'
VCPUS=2
create_networked_guest one 11
is 'the guest uses two queues' "$(read_key /local/domain/$(domain_id one)/device/vif/0/multi-queue-num-queues)" 2
# A thread and a queue in the bridge for each, as far as there are processors (`cargo xtask vm xen --processors 2`).
processors=$(nproc)
[ $processors -le 2 ] || processors=2
is 'so does its interface in the bridge' "$(ls -d /sys/class/net/vif$(domain_id one).0/queues/tx-* | wc -l)" $processors
check_streams one 11 64
complete_scenario
