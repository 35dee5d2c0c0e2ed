# title: some integration tests of the uplink, over vhost-net, with the programs of this computer (`vhost-suite`: all)
# set: core
# machine: linux-programs
# limit: 90
# tests: uplink uplink_programs

. /vm/linux/computer.sh
over_vhost
plan 8
for each in tcp_arrives_undamaged_both_ways datagrams_of_every_length_come_back several_queues_carry_a_guests_conversations; do
    case_of uplink $each
done
for each in git_clones_a_repository ssh_logs_in; do
    case_of uplink_programs $each
done
