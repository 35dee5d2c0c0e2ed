# title: all integration tests of the uplink, over vhost-net, with the programs of this computer
# set: all
# machine: linux-programs
# limit: 240
# tests: network

. /vm/linux/computer.sh
use_vhost
check_cases network uplink:: uplink_programs::
complete_scenario
