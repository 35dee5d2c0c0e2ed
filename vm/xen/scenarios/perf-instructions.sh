# title: processor time a packet, of dom0, the guest and the hypervisor for them: xen-netback, and serve in three setups
# set: name
# machine: xen-netback
# limit: 1200
# driver: netfront

# With `--count-instructions` a millisecond of processor time is a million instructions, which nothing else on the computer
# changes. Of a stream, that of both SHA-256 is in it, the same in each setup.

. /vm/xen/perf.sh
. /vm/xen/staging.sh
. /vm/xen/driver.sh

SIZE=${SIZE:-64}
PINGS=${PINGS:-10000}

# ping_one_slot: sends packets of 1000 bytes, which are answered.
ping_one_slot() {
    ON_LIMIT=600 on one "ping -q -c $PINGS -i 0.002 -W 5 -s 1000 $ADDRESS | grep ' 0% packet loss'"
}

# measure_command LABEL WORKLOAD COMMAND...: checks a command, and writes a row of its processor time and packets.
measure_command() {
    local label=$1 workload=$2 vif=vif$(domain_id one).0 before dom0 served frames
    shift 2
    frames=$(interface_frames $vif) served=$(daemon_counters) dom0=$(cpu_seconds Domain-0) before=$(cpu_seconds_of_both)
    check "$label: $workload" "$@"
    dom0=$(milliseconds "$(cpu_seconds Domain-0) - $dom0") before=$(milliseconds "$(cpu_seconds_of_both) - $before")
    frames=$(($(interface_frames $vif) - frames)) served=$(daemon_counters_since "$served")
    note "$label, $workload: $frames packets, $before ms of both domains ($dom0 ms of dom0): $((before * 1000 / frames)) us a packet"
    write_row instructions $workload $label packet $frames cpu_ms=$before dom0_ms=$dom0 $served
}

# measure_workloads LABEL: measures packets of the MTU, of TSO, and of one slot.
measure_workloads() {
    check "$1: segments are made in the guest" on one 'ethtool -K eth0 tso off gso off'
    measure_command $1 mtu1500 send_stream one dom0 $ADDRESS
    on one 'ethtool -K eth0 gso on tso on'
    measure_command $1 tso send_stream one dom0 $ADDRESS
    measure_command $1 receive send_stream dom0 one 10.77.0.11
    measure_command $1 one-slot ping_one_slot
}

# measure_setup LABEL: measures the workloads in a new guest.
measure_setup() {
    create_networked_guest one 11
    measure_workloads $1
    check_destruction one
}

guests_with tools driver
stream_sum $SIZE
use_ringfence
EXTRA=driver=xen-netfront
measure_setup copy
EXTRA=
measure_setup copy-driver
check 'staging: configured' reload_daemon '[network]' 'mode = "staging"'
create_guest_with_our_driver one 11
check 'our driver: its pages are staged' wait_for 40 has_staged one 512
measure_workloads staging-driver
check_destruction one
kill $SERVE
check 'serve ends when it is told to' wait $SERVE
check 'the kernel has xen-netback' modprobe xen-netback
SCRIPT=vif-control
EXTRA=driver=xen-netfront
measure_setup netback
EXTRA=
measure_setup netback-driver
check_not 'dom0 has nothing to complain of' on dom0 "dmesg | grep -E 'BUG|WARNING|Oops|Call Trace'"
complete_scenario
