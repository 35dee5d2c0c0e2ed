# title: some integration tests of the uplink, over vhost-net, with the programs of this computer (`vhost-suite`: all)
# set: core
# machine: linux-programs
# limit: 90
# tests: network

. /vm/linux/computer.sh
use_vhost
for each in tcp_data_arrives_undamaged_in_both_directions datagram_of_any_length_is_echoed flows_use_several_queues; do
    check_case network uplink::$each
done
for each in git_clone_succeeds ssh_login_succeeds; do
    check_case network uplink_programs::$each
done
complete_scenario
