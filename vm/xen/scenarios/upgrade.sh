# title: the daemon killed and started again: several queues, staged pages, and a guest that went away meanwhile
# set: all
# machine: xen
# limit: 150

. /vm/xen/staging.sh

LOG=/share/serve-$SCENARIO.log

killed() {
    kill -9 $SERVE
    wait $SERVE
    ! ringfence status
}

queues_of() {
    of_vif $1 '"queue_count"'
}

# taken_over: checks nothing; how many interfaces the daemon says it took over.
taken_over() {
    ringfence status --json | grep -o '"adopted": *true' | wc -l
}

destroyed_meanwhile() {
    xl destroy $1
    wait_for 20 is_not_there $2
}

use_ringfence '[network]' 'mode = "staging"' 'max-queues = 2'
attached_staging one 11 2
VCPUS=2
networked two 12
networked three 13
is 'the attached guest has two queues' "$(queues_of one)" 2
is 'so has the one with an unmodified driver' "$(queues_of two)" 2

number=$(domain three)
check 'the daemon is killed' killed
check 'a guest goes away meanwhile' destroyed_meanwhile three $number
check 'its interface is left' test -e /sys/class/net/vif$number.0
ip link add vif98.0 type bridge
echo 1 >/run/ringfence/interfaces/vif98.0
check 'another daemon starts' serve
check 'the interface that was left is removed' wait_for 10 test ! -e /sys/class/net/vif$number.0
check 'the log says so' grep "removed: .*vif$number.0" $LOG
check "one of somebody else's stays" test -e /sys/class/net/vif98.0
is 'the other two guests are taken over' "$(taken_over)" 2
check 'both ends are connected' connected one
check 'of the other one too' connected two
is 'with two queues' "$(queues_of one)" 2
is 'and two' "$(queues_of two)" 2
is 'what was staged is staged again' "$(staged one)" $STAGED
no_operations 'taken over' one 11 20
streams two 12 8

check 'the daemon is killed again' killed
configure '[network]' 'mode = "copy"' 'max-queues = 2'
check 'one that stages for nobody starts' serve
is 'for whom it was told so pages are staged' "$(staged one)" $STAGED
no_operations 'and still' one 11 20
check_not 'nothing is charged to anybody' on dom0 "ringfence status | grep 'rules broken'"
gone one
gone two
complete
