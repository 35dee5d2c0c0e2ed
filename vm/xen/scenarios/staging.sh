# title: staging grants: `attach` in a guest against `serve`, an unmodified guest beside it, each control message
# set: core
# machine: xen
# limit: 120
# grants: bad 0xdbba0

. /vm/xen/staging.sh

# mapped_pages NAME: prints the number of a guest's pages that are mapped.
mapped_pages() {
    grants_in_use $(domain_id $1) | wc -l
}

start_dialogue() {
    on $1 'echo vif-0 >/sys/bus/xen/drivers/vif/unbind; mkdir -p /tmp/go'
    on $1 '{ ringfence-bench internal control-ring --pages 64 --hold /tmp/go >/tmp/control.log 2>&1; echo $? >/tmp/control.status; } &'
}

dialogue_passes() {
    on $1 'wait_for 40 test -s /tmp/control.status; cat /tmp/control.log; exit $(cat /tmp/control.status)'
}

use_ringfence '[network]' 'mode = "staging"' 'max-queues = 2'
attach_with_staging one 11 2
check_packets_cost_no_operation 'two queues' one 11 0 8
guests_with bench
create_networked_guest two 12
before=$(daemon_operations)
check_streams two 12 8
check 'for the unmodified guest beside it pages are copied' test $(daemon_operations) -gt $before
is 'it stages nothing' "$(staged_page_count two)" 0
check_transfer 'from one to the other' one two 10.77.0.12 4
check_transfer 'and back' two one 10.77.0.11 4

start_dialogue two
check 'pages are staged, message by message' wait_for 40 on two 'grep "^64 pages are staged" /tmp/control.log'
# Three rings besides.
is 'and mapped' "$(mapped_pages two)" 67
is 'status knows' "$(staged_page_count two)" 64
on two 'touch /tmp/go/1'
check 'they are taken out again' wait_for 40 on two 'grep "^no page is staged" /tmp/control.log'
is 'and not mapped any more' "$(mapped_pages two)" 3
on two 'touch /tmp/go/2'
check 'each of the ten kinds of messages was answered as it has to be' dialogue_passes two
is 'nothing of that guest is mapped' "$(mapped_pages two)" 0
check_transfer 'the first guest goes on' one dom0 $ADDRESS 8
# The other one is, for what it asked in vain.
check_not 'and is charged with nothing' on dom0 "ringfence status | grep \"^vif$(domain_id one).0: rules broken\""
check_destruction two
check_destruction one
complete_scenario
