# title: staging grants: `attach` in a guest against `serve`, an unmodified guest beside it, each control message
# set: core
# machine: xen
# limit: 120
# grants: bad 0xdbba0

. /vm/xen/staging.sh

# What is mapped of a guest, in pages.
pages_mapped() {
    grants_in_use $(domain $1) | wc -l
}

dialogue() {
    on $1 'echo vif-0 >/sys/bus/xen/drivers/vif/unbind; mkdir -p /tmp/go'
    on $1 '{ ringfence-bench internal control-ring --pages 64 --hold /tmp/go >/tmp/control.log 2>&1; echo $? >/tmp/control.status; } &'
}

dialogue_passed() {
    on $1 'wait_for 40 test -s /tmp/control.status; cat /tmp/control.log; exit $(cat /tmp/control.status)'
}

use_ringfence '[network]' 'mode = "staging"' 'max-queues = 2'
attached_staging one 11 2
no_operations 'two queues' one 11 0 8
guests_with bench
networked two 12
before=$(operations)
streams two 12 8
check 'for the unmodified guest beside it pages are copied' test $(operations) -gt $before
is 'it stages nothing' "$(staged two)" 0
transfer 'from one to the other' one two 10.77.0.12 4
transfer 'and back' two one 10.77.0.11 4

dialogue two
check 'pages are staged, message by message' wait_for 40 on two 'grep "^64 pages are staged" /tmp/control.log'
# Three rings besides.
is 'and mapped' "$(pages_mapped two)" 67
is 'status knows' "$(staged two)" 64
on two 'touch /tmp/go/1'
check 'they are taken out again' wait_for 40 on two 'grep "^no page is staged" /tmp/control.log'
is 'and not mapped any more' "$(pages_mapped two)" 3
on two 'touch /tmp/go/2'
check 'each of the ten kinds of messages was answered as it has to be' dialogue_passed two
is 'nothing of that guest is mapped' "$(pages_mapped two)" 0
transfer 'the first guest goes on' one dom0 $ADDRESS 8
# The other one is, for what it asked in vain.
check_not 'and is charged with nothing' on dom0 "ringfence status | grep \"^vif$(domain one).0: rules broken\""
gone two
gone one
complete
