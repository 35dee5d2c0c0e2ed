# title: `bench seeds vhost`: kernel vhost-net beside reads and writes of a TAP
# set: name
# machine: linux
# limit: 200

load_modules vhost_net
check 'vhost-net has its device' test -c /dev/vhost-net || give_up 'nothing to drive'
check 'every row was measured' ringfence-bench seeds vhost --rounds 3
while read -r line; do
    note "$line"
done </tmp/check.out
complete_scenario
