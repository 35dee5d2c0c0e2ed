# title: our driver in a PVH guest, with grant windows of a PVH driver domain: counts, restarts, forced revocation, fallback
# group: window
# set: name
# machine: xen-pvh
# limit: 500
# driver: netfront window

. /vm/xen/window.sh
. /vm/xen/perf.sh
. /vm/xen/driver.sh

# issued_pages_are PAGES: succeeds if the driver and the hypervisor count that many issued pages.
issued_pages_are() {
    [ "$(driver_counter one issued_pages)" = $1 ] && [ $(count_issued_pages) = $1 ]
}

# restart_driver_daemon MODE: kills the daemon, and starts another with this mode.
restart_driver_daemon() {
    kill_driver_daemon && start_driver_daemon "[network]\\nmode = \"$1\"\\nmax-queues = 2\\n"
}

# set_queues COUNT: changes the number of queues, and waits until each has two windows with all their pages.
set_queues() {
    on one "ethtool -L eth0 combined $1" && has_queues one $1 && windows_are_open $((2 * $1)) && issued_pages_are $((512 * $1))
}

# shrink_windows: lets the guest's kernel ask the driver for memory, and waits until it gets some.
shrink_windows() {
    on one "echo 2 >/proc/sys/vm/drop_caches; wait_for 20 sh -c 'ethtool -S eth0 | grep -q \"shrunk_pages: [1-9]\"'"
}

# freed_pages_are_revoked REVOKES: succeeds if the hypervisor has revoked the pages that the driver freed, beyond its
# earlier count REVOKES, and the others are issued.
freed_pages_are_revoked() {
    local freed=$(driver_counter one shrunk_pages)
    [ $(($(granter_counter one revoked) - $1)) = $freed ] && [ $(count_issued_pages) = $((1024 - freed)) ]
}

unbind_driver() {
    on one "echo vif-0 >/sys/bus/xen/drivers/$DRIVER/unbind"
}

bind_driver() {
    on one "echo vif-0 >/sys/bus/xen/drivers/$DRIVER/bind" && configure_network one 11
}

# Only a debug build of the hypervisor counts the operations of all domains.
reset_hypervisor_counters
is_counted=no
! hypervisor_counters >/dev/null || is_counted=yes
guests_with window
before=$(free_memory)
create_driver_domain '[network]\nmode = "window"\nmax-queues = 2\n'
guests_with tools driver
# Two queues by one virtual processor: a PVH guest of two stood still at its start, with the emulator idle.
EXTRA=DRIVER_OPTIONS=max_queues=2
create_guest_of_driver_domain one 11
is 'the driver says so in one line' "$(on one 'dmesg | grep -c "grant windows"' | tr -d '\r')" 1
check 'with the numbers' driver_logged one '1024 pages are issued in grant windows, 512 of them for sending'
check 'the hypervisor has a window for each ring' windows_are_open 4
check 'all pages of two queues are issued' issued_pages_are 1024

# No packet costs either side an operation.
operations=$(driver_domain_operations) issues=$(granter_counter one issued) packets=$(driver_counter one '[rt]x[01]_packets')
reset_hypervisor_counters
check_transfer 'one to net, IPv4' one net $ADDRESS 16
check_transfer 'net to one, IPv4' net one 10.77.0.11 16
check_transfer 'one to net, IPv6' one net $ADDRESS6 16
check_transfer 'net to one, IPv6' net one fd77::11 16
counts=$(hypervisor_counters) || counts=
packets=$(($(driver_counter one '[rt]x[01]_packets') - packets))
note "$packets packets: ${counts:-not counted}"
check 'that was a thousand packets or more' test $packets -gt 1000
is 'no map, unmap or copy of the driver domain' $(($(driver_domain_operations) - operations)) 0
is 'no page was issued' $(($(granter_counter one issued) - issues)) 0
is 'none was revoked' "$(granter_counter one revoked)" 0
for each in maps unmaps copies issues revokes; do
    label="the hypervisor counted no $each"
    if [ $is_counted = yes ]; then
        is "$label" "$(echo "$counts" | grep -o "\b$each=[0-9]*")" $each=0
    else
        skip "$label" 'only a debug build counts the operations of all domains (--debug-xen)'
    fi
done
check 'packets were sent from pages of windows' test "$(driver_counter one 'tx[01]_window_slots')" -gt 1000
check 'packets were sent and received whole' test "$(driver_counter one '[rt]x[01]_gso')" -gt 100
on one '{ traffic return 7100 >/dev/null 2>&1; } &'
check 'datagrams of every length come back' on net 'traffic datagrams 10.77.0.11 7100 200'
is 'nothing else is staged' "$(driver_counter one staged_pages)" 0

# A daemon that dies takes its windows with it.
check_transfers_during 'killed and started' one 11 net 8 restart_driver_daemon window
check 'the successor has four windows' wait_for 20 windows_are_open 4
check 'all pages are issued again' wait_for 20 issued_pages_are 1024
operations=$(driver_domain_operations)
check_transfer 'one to the successor' one net $ADDRESS 4
is 'no map, unmap or copy with it' $(($(driver_domain_operations) - operations)) 0

check 'one queue' set_queues 1
check_transfer 'one queue: net to one' net one 10.77.0.11 4
check 'two queues again' set_queues 2
check_driver_rebinding one 11 3 net
check 'all pages are issued after that' wait_for 20 issued_pages_are 1024
check 'unbound' unbind_driver
check 'no window is left' wait_for 10 no_windows
check 'bound' bind_driver

# The driver takes pages back alone.
issues=$(granter_counter one issued) revokes=$(granter_counter one revoked)
check 'memory pressure frees pages of windows' shrink_windows
check 'the hypervisor revoked these, and no others' wait_for 10 freed_pages_are_revoked $revokes
is 'none by force' "$(driver_counter one window_forced_revokes)" 0
check_transfer 'with fewer pages: one to net' one net $ADDRESS 4
check_transfer 'with fewer pages: net to one' net one 10.77.0.11 4
is 'no page was issued for that' "$(granter_counter one issued)" $issues

# A stopped daemon whose status words say that it uses pages of packets that it has answered.
check 'the driver connects anew' change_driver one 11 $DRIVER $DRIVER
busy=$(granter_counter one busy) revokes=$(granter_counter one revoked)
check 'the daemon is stopped' stop_driver_daemon
is 'its status words are raised in four tables' "$(on net '. /vm/xen/window.sh; raise_status_words 100 123' | tr -d '\r')" 4
check 'memory pressure frees pages although it is stopped' shrink_windows
check 'the hypervisor revoked these pages, too' wait_for 10 freed_pages_are_revoked $revokes
forced=$(driver_counter one window_forced_revokes)
note "$(driver_counter one shrunk_pages) pages freed, $forced by force"
check 'some of them by force' test $forced -gt 0
is 'those that the hypervisor called busy' $forced $(($(granter_counter one busy) - busy))
check 'the driver says that the backend keeps pages' driver_logged one 'pages of packets that it has answered; they were revoked by force'
check 'the daemon goes on' on net 'kill -CONT $(cat /tmp/serve.pid); wait_for 20 ringfence status'
check_transfer 'one to net, after that' one net $ADDRESS 4
check_transfer 'net to one, after that' net one 10.77.0.11 4

# A daemon that is stopped in the middle of traffic cannot keep the pages.
on net 'start_receiver 6000'
sent=$(on one 'cat /sys/class/net/eth0/statistics/tx_bytes' | tr -d '\r')
on one "{ traffic send $ADDRESS 6000 200 >/dev/null 2>&1 & }"
check 'packets flow' on one "wait_for 20 sh -c 'test \$(cat /sys/class/net/eth0/statistics/tx_bytes) -gt $((sent + 1000000))'"
check 'the daemon is stopped under load' stop_driver_daemon
full=$(guest_free_pages one) issued=$(count_issued_pages)
check 'the driver is unbound' unbind_driver
check 'no window is left although the daemon is stopped' wait_for 10 no_windows
on one 'killall traffic'
freed=$(($(guest_free_pages one) - full))
note "$issued pages were issued; $freed pages of the guest are free again"
check 'the guest has the pages of its windows again' test $freed -ge $issued
on net 'kill -CONT $(cat /tmp/serve.pid); killall traffic; wait_for 20 ringfence status'
check 'bound again' bind_driver
check_transfer 'one to net, bound again' one net $ADDRESS 4

# Fallback: the daemon has another mode, the parameter says so, another guest has a backend without windows.
check 'a successor with mode staging' restart_driver_daemon staging
check 'the driver stages its pages' wait_for 40 driver_logged one '1024 pages are staged, 512 of them for sending (no grant windows: the backend opens none)'
is 'no page is issued' "$(driver_counter one issued_pages)" 0
check_transfer 'staged: one to net' one net $ADDRESS 4
check 'a successor with mode window takes over' restart_driver_daemon window
check 'the driver connects anew' change_driver one 11 $DRIVER $DRIVER
check 'the windows are back' wait_for 20 issued_pages_are 1024
on one 'echo 0 >/sys/module/ringfence_netfront/parameters/windows'
check 'the driver connects anew without windows' change_driver one 11 $DRIVER $DRIVER
check 'and says why' wait_for 40 driver_logged one '1024 pages are staged, 512 of them for sending (no grant windows: they are switched off)'
check_kernel_log one

guests_with tools driver
EXTRA=
use_ringfence '[network]' 'mode = "window"'
create_guest_with_our_driver two 12
check 'its driver says why there are no windows' wait_for 40 driver_logged two '512 pages are staged, 256 of them for sending (no grant windows: the backend opens none)'
is 'in one line' "$(on two 'dmesg | grep -c "grant windows"' | tr -d '\r')" 1
check_transfer 'two to dom0' two dom0 $ADDRESS 4
check_kernel_log two
for each in one two net; do xl destroy $each; done
check 'the domains leave no zombie' wait_for 30 only_dom0_is_left
is 'the memory is free again' "$(free_memory)" "$before"
complete_scenario
