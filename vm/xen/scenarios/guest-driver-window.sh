# title: our driver in a PVH guest, with grant windows of a PVH driver domain: counts, restarts, forced revocation, fallback
# group: window
# set: name
# machine: xen-pvh
# limit: 500
# driver: netfront window

. /vm/xen/window.sh
. /vm/xen/perf.sh
. /vm/xen/driver.sh

# all_issued PAGES: so many pages of the guest are issued, by the driver and by the hypervisor.
all_issued() {
    [ "$(counter one issued_pages)" = $1 ] && [ $(pages_issued) = $1 ]
}

# restarted MODE: the daemon is killed, and its successor has this mode.
restarted() {
    CONFIGURATION="[network]\\nmode = \"$1\"\\nmax-queues = 2\\n"
    died && serving
}

# channels COUNT: the driver connects anew with so many queues, which have two windows each.
channels() {
    on one "ethtool -L eth0 combined $1" && queues one $1 && windows_are $((2 * $1)) && all_issued $((512 * $1))
}

# shrunk: the kernel asks the driver for memory, and gets it.
shrunk() {
    on one "echo 2 >/proc/sys/vm/drop_caches; wait_for 20 sh -c 'ethtool -S eth0 | grep -q \"shrunk_pages: [1-9]\"'"
}

# taken_back REVOKES: the hypervisor has revoked the pages that the driver freed, after so many, and the others are issued.
taken_back() {
    local freed=$(counter one shrunk_pages)
    [ $(($(granted one revoked) - $1)) = $freed ] && [ $(pages_issued) = $((1024 - freed)) ]
}

unbound() {
    on one "echo vif-0 >/sys/bus/xen/drivers/$DRIVER/unbind"
}

bound() {
    on one "echo vif-0 >/sys/bus/xen/drivers/$DRIVER/bind" && again_with_address one 11
}

# Only a debug build of the hypervisor counts the operations of all domains.
counting
is_counted=no
! counters >/dev/null || is_counted=yes
guests_with window
before=$(free_memory)
driver_domain '[network]\nmode = "window"\nmax-queues = 2\n'
guests_with tools driver
# Two queues by one virtual processor: a PVH guest of two stood still at its start, with the emulator idle.
EXTRA=DRIVER_OPTIONS=max_queues=2
driven_from_domain one 11
is 'the driver says so in one line' "$(on one 'dmesg | grep -c "grant windows"' | tr -d '\r')" 1
check 'with the numbers' says one '1024 pages are issued in grant windows, 512 of them for sending'
check 'the hypervisor has a window for each ring' windows_are 4
check 'all pages of two queues are issued' all_issued 1024

# No packet costs either side an operation.
operations=$(operations_of_driver) issues=$(granted one issued) packets=$(counter one '[rt]x[01]_packets')
counting
transfer 'one to net, IPv4' one net $ADDRESS 16
transfer 'net to one, IPv4' net one 10.77.0.11 16
transfer 'one to net, IPv6' one net $ADDRESS6 16
transfer 'net to one, IPv6' net one fd77::11 16
counts=$(counters) || counts=
packets=$(($(counter one '[rt]x[01]_packets') - packets))
note "$packets packets: ${counts:-not counted}"
check 'that was a thousand packets or more' test $packets -gt 1000
is 'no map, unmap or copy of the driver domain' $(($(operations_of_driver) - operations)) 0
is 'no page was issued' $(($(granted one issued) - issues)) 0
is 'none was revoked' "$(granted one revoked)" 0
for each in maps unmaps copies issues revokes; do
    label="the hypervisor counted no $each"
    if [ $is_counted = yes ]; then
        is "$label" "$(echo "$counts" | grep -o "\b$each=[0-9]*")" $each=0
    else
        skip "$label" 'only a debug build counts the operations of all domains (--debug-xen)'
    fi
done
check 'packets were sent from pages of windows' test "$(counter one 'tx[01]_window_slots')" -gt 1000
check 'packets were sent and received whole' test "$(counter one '[rt]x[01]_gso')" -gt 100
on one '{ traffic return 7100 >/dev/null 2>&1; } &'
check 'datagrams of every length come back' on net 'traffic datagrams 10.77.0.11 7100 200'
is 'nothing else is staged' "$(counter one staged_pages)" 0

# A daemon that dies takes its windows with it.
during 'killed and started' one 11 8 restarted window
check 'the successor has four windows' wait_for 20 windows_are 4
check 'all pages are issued again' wait_for 20 all_issued 1024
operations=$(operations_of_driver)
transfer 'one to the successor' one net $ADDRESS 4
is 'no map, unmap or copy with it' $(($(operations_of_driver) - operations)) 0

check 'one queue' channels 1
transfer 'one queue: net to one' net one 10.77.0.11 4
check 'two queues again' channels 2
rebound one 11 3
check 'all pages are issued after that' wait_for 20 all_issued 1024
check 'unbound' unbound
check 'no window is left' wait_for 10 windows_none
check 'bound' bound

# The driver takes pages back alone.
issues=$(granted one issued) revokes=$(granted one revoked)
check 'memory pressure frees pages of windows' shrunk
check 'the hypervisor revoked these, and no others' wait_for 10 taken_back $revokes
is 'none by force' "$(counter one window_forced_revokes)" 0
transfer 'with fewer pages: one to net' one net $ADDRESS 4
transfer 'with fewer pages: net to one' net one 10.77.0.11 4
is 'no page was issued for that' "$(granted one issued)" $issues

# A stopped daemon whose status words say that it uses pages of packets that it has answered.
check 'the driver connects anew' bound_again one 11 $DRIVER $DRIVER
busy=$(granted one busy) revokes=$(granted one revoked)
check 'the daemon is stopped' stopped
is 'its status words are raised in four tables' "$(on net '. /vm/xen/window.sh; raise_words 100 123' | tr -d '\r')" 4
check 'memory pressure frees pages although it is stopped' shrunk
check 'the hypervisor revoked these pages, too' wait_for 10 taken_back $revokes
forced=$(counter one window_forced_revokes)
note "$(counter one shrunk_pages) pages freed, $forced by force"
check 'some of them by force' test $forced -gt 0
is 'those that the hypervisor called busy' $forced $(($(granted one busy) - busy))
check 'the driver says that the backend keeps pages' says one 'pages of packets that it has answered; they were revoked by force'
check 'the daemon goes on' on net 'kill -CONT $(cat /tmp/serve.pid); wait_for 20 ringfence status'
transfer 'one to net, after that' one net $ADDRESS 4
transfer 'net to one, after that' net one 10.77.0.11 4

# A daemon that is stopped in the middle of traffic cannot keep the pages.
on net 'receive 6000'
sent=$(on one 'cat /sys/class/net/eth0/statistics/tx_bytes' | tr -d '\r')
on one "{ traffic send $ADDRESS 6000 200 >/dev/null 2>&1 & }"
check 'packets flow' on one "wait_for 20 sh -c 'test \$(cat /sys/class/net/eth0/statistics/tx_bytes) -gt $((sent + 1000000))'"
check 'the daemon is stopped under load' stopped
full=$(free_pages) issued=$(pages_issued)
check 'the driver is unbound' unbound
check 'no window is left although the daemon is stopped' wait_for 10 windows_none
on one 'killall traffic'
freed=$(($(free_pages) - full))
note "$issued pages were issued; $freed pages of the guest are free again"
check 'the guest has the pages of its windows again' test $freed -ge $issued
on net 'kill -CONT $(cat /tmp/serve.pid); killall traffic; wait_for 20 ringfence status'
check 'bound again' bound
transfer 'one to net, bound again' one net $ADDRESS 4

# Fallback: the daemon has another mode, the parameter says so, another guest has a backend without windows.
check 'a successor with mode staging' restarted staging
check 'the driver stages its pages' wait_for 40 says one '1024 pages are staged, 512 of them for sending (no grant windows: the backend opens none)'
is 'no page is issued' "$(counter one issued_pages)" 0
transfer 'staged: one to net' one net $ADDRESS 4
check 'a successor with mode window takes over' restarted window
check 'the driver connects anew' bound_again one 11 $DRIVER $DRIVER
check 'the windows are back' wait_for 20 all_issued 1024
on one 'echo 0 >/sys/module/ringfence_netfront/parameters/windows'
check 'the driver connects anew without windows' bound_again one 11 $DRIVER $DRIVER
check 'and says why' wait_for 40 says one '1024 pages are staged, 512 of them for sending (no grant windows: they are switched off)'
healthy one

guests_with tools driver
EXTRA= PEER=dom0 BACKEND=/local/domain/0/backend
use_ringfence '[network]' 'mode = "window"'
driven two 12
check 'its driver says why there are no windows' wait_for 40 says two '512 pages are staged, 256 of them for sending (no grant windows: the backend opens none)'
is 'in one line' "$(on two 'dmesg | grep -c "grant windows"' | tr -d '\r')" 1
transfer 'two to dom0' two dom0 $ADDRESS 4
healthy two
for each in one two net; do xl destroy $each; done
check 'the domains leave no zombie' wait_for 30 alone
is 'the memory is free again' "$(free_memory)" "$before"
complete
