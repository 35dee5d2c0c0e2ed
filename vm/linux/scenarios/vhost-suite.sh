# title: the integration tests of the uplink, over vhost-net, with the programs of this computer
# set: name
# machine: linux-programs
# limit: 240
# tests: uplink uplink_programs

. /vm/linux/computer.sh
LINK=vhost
load vhost_net
check 'vhost-net has its device' test -c /dev/vhost-net || give_up 'nothing to drive'
check 'the files of the computer are there' enter_computer || give_up 'no programs'
cases uplink uplink_programs >/tmp/cases
plan $((2 + $(wc -l </tmp/cases)))
while read -r name each; do
    case_of $name $each </dev/null
done </tmp/cases
