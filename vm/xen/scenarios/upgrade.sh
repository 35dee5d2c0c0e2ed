# title: the daemon killed and started again: several queues, staged pages, and a guest that went away meanwhile
# set: all
# machine: xen
# limit: 150

. /vm/xen/staging.sh

LOG=/share/serve-$SCENARIO.log

kill_daemon() {
    kill -9 $SERVE
    wait $SERVE
    ! ringfence status
}

vif_queue_count() {
    vif_status_sum $1 '"queue_count"'
}

# adopted_vifs: prints the number of interfaces that the daemon has taken over.
adopted_vifs() {
    ringfence status --json | grep -o '"adopted": *true' | wc -l
}

destroy_meanwhile() {
    xl destroy $1
    wait_for 20 domain_is_gone $2
}

use_ringfence '[network]' 'mode = "staging"' 'max-queues = 2'
attach_with_staging one 11 2
VCPUS=2
create_networked_guest two 12
create_networked_guest three 13
is 'the attached guest has two queues' "$(vif_queue_count one)" 2
is 'so has the one with an unmodified driver' "$(vif_queue_count two)" 2

number=$(domain_id three)
check 'the daemon is killed' kill_daemon
check 'a guest goes away meanwhile' destroy_meanwhile three $number
check 'its interface is left' test -e /sys/class/net/vif$number.0
ip link add vif98.0 type bridge
echo 1 >/run/ringfence/interfaces/vif98.0
check 'another daemon starts' start_daemon
check 'the interface that was left is removed' wait_for 10 test ! -e /sys/class/net/vif$number.0
check 'the log says so' grep "removed: .*vif$number.0" $LOG
check "one of somebody else's stays" test -e /sys/class/net/vif98.0
is 'the other two guests are taken over' "$(adopted_vifs)" 2
check 'both ends are connected' vif_connected one
check 'of the other one too' vif_connected two
is 'with two queues' "$(vif_queue_count one)" 2
is 'and two' "$(vif_queue_count two)" 2
is 'what was staged is staged again' "$(staged_page_count one)" $((2 * ATTACH_PAGES))
check_packets_cost_no_operation 'taken over' one 11 20
check_streams two 12 8

check 'the daemon is killed again' kill_daemon
write_configuration '[network]' 'mode = "copy"' 'max-queues = 2'
check 'one that stages for nobody starts' start_daemon
is 'for whom it was told so pages are staged' "$(staged_page_count one)" $((2 * ATTACH_PAGES))
check_packets_cost_no_operation 'and still' one 11 20
check_not 'nothing is charged to anybody' on dom0 "ringfence status | grep 'rules broken'"
check_destruction one
check_destruction two
complete_scenario
