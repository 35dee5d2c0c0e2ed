# title: all integration tests of the uplink, over vhost-net, with the programs of this computer
# set: all
# machine: linux-programs
# limit: 240
# tests: network

. /vm/linux/computer.sh
use_vhost
list_cases network uplink:: uplink_programs:: >/tmp/cases
check 'the tests have cases' test -s /tmp/cases
ran=0
while read -r name each; do
    check_case $name $each </dev/null
    ran=$((ran + 1))
done </tmp/cases
is 'each case was run' $ran $(wc -l </tmp/cases)
complete_scenario
