# title: all integration tests of the uplink, over vhost-net, with the programs of this computer
# set: all
# machine: linux-programs
# limit: 240
# tests: uplink uplink_programs

. /vm/linux/computer.sh
over_vhost
cases uplink uplink_programs >/tmp/cases
plan $((3 + $(wc -l </tmp/cases)))
while read -r name each; do
    case_of $name $each </dev/null
done </tmp/cases
