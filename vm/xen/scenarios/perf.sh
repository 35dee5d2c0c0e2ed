# title: grant operations a packet, counted by the hypervisor: ringfence serve in each mode, and the kernel's xen-netback
# set: all
# machine: xen-netback
# limit: 240
# hypervisor: debug
# driver: netfront

. /vm/xen/perf.sh
. /vm/xen/staging.sh
. /vm/xen/driver.sh

# measure_mode MODE: measures the network of a guest with its own driver, served in this mode.
measure_mode() {
    check "$1: configured" reload_daemon '[network]' "mode = \"$1\""
    check "$1: a guest that connects" create_guest one "$(vif_line 11)"
    check "$1: has a network" start_network one 11
    measure_network $1
    xl destroy one
}

use_ringfence
stream_sum 16
measure_mode copy
copy=$OPERATIONS copy_each=$EACH copy_used=$USED
measure_mode map
map=$OPERATIONS map_each=$EACH map_used=$USED
check 'staging: configured' reload_daemon '[network]' 'mode = "staging"'
attach_with_staging one 11 1
measure_network staging
# The hypervisor's own count; the console of the guest and the store work by pages that stay mapped.
is 'staging: no grant operation in the hypervisor' $OPERATIONS 0
is 'nor for a packet of one slot' $EACH 0.00
staging_used=$USED
check_destruction one
guests_with tools driver
create_guest_with_our_driver one 11
check 'our driver: its pages are staged' wait_for 40 has_staged one 512
measure_network staging-driver
is 'our driver: no grant operation in the hypervisor' $OPERATIONS 0
is 'our driver: nor for a packet of one slot' $EACH 0.00
unset RAMDISK MEMORY
check_destruction one
kill $SERVE
check 'serve ends when it is told to' wait $SERVE
check 'the kernel has xen-netback' modprobe xen-netback
SCRIPT=vif-control
create_networked_guest one 11
measure_network netback
note "ringfence to netback, under emulation: grant operations for the same bytes: copy" \
    "$(ratio $copy $OPERATIONS), map $(ratio $map $OPERATIONS); for a packet of one slot: copy" \
    "$(ratio $copy_each $EACH), map $(ratio $map_each $EACH); processor time: copy" \
    "$(ratio $copy_used $USED), map $(ratio $map_used $USED), staging $(ratio $staging_used $USED)"
check 'the hypervisor counted' test $OPERATIONS -gt 1000
# The number of packets that TCP makes of the same bytes differs a little from run to run.
check 'copy costs no more operations than xen-netback' awk "BEGIN { exit !($copy <= 1.25 * $OPERATIONS) }"
check 'nor for each packet of one slot' awk "BEGIN { exit !($copy_each <= 1.05 * $EACH) }"
check_destruction one
check_not 'dom0 has nothing to complain of' on dom0 "dmesg | grep -E 'BUG|WARNING|Oops|Call Trace'"
complete_scenario
