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

# stream FROM TO ADDRESS: SIZE MiB through TCP, with the right SHA-256.
stream() {
    PORT=$((${PORT:-9000} + 1))
    on $2 "receive $PORT" && ON_LIMIT=600 on $1 "traffic send $3 $PORT $SIZE" &&
        [ "$(on $2 "received $PORT")" = "$(stream_sum $SIZE)" ]
}

# one_slot: packets of 1000 bytes, to and fro.
one_slot() {
    ON_LIMIT=600 on one "ping -q -c $PINGS -i 0.002 -W 5 -s 1000 $ADDRESS | grep ' 0% packet loss'"
}

# took LABEL WORKLOAD COMMAND...: 1 check. Processor time of the command, and its packets through the interface.
took() {
    local label=$1 workload=$2 vif=vif$(domain one).0 before dom0 served frames
    shift 2
    frames=$(passed $vif) served=$(daemon) dom0=$(cpu_seconds Domain-0) before=$(both_used)
    check "$label: $workload" "$@"
    dom0=$(milliseconds "$(cpu_seconds Domain-0) - $dom0") before=$(milliseconds "$(both_used) - $before")
    frames=$(($(passed $vif) - frames)) served=$(daemon_since "$served")
    note "$label, $workload: $frames packets, $before ms of both domains ($dom0 ms of dom0): $((before * 1000 / frames)) us a packet"
    row instructions $workload $label packet $frames cpu_ms=$before dom0_ms=$dom0 $served
}

# workloads LABEL: 5 checks, with packets of the MTU, of TSO, and of one slot.
workloads() {
    check "$1: segments are made in the guest" on one 'ethtool -K eth0 tso off gso off'
    took $1 mtu1500 stream one dom0 $ADDRESS
    on one 'ethtool -K eth0 gso on tso on'
    took $1 tso stream one dom0 $ADDRESS
    took $1 receive stream dom0 one 10.77.0.11
    took $1 one-slot one_slot
}

# setup LABEL: 8 checks.
setup() {
    networked one 11
    workloads $1
    gone one
}

guests_with tools driver
stream_sum $SIZE
use_ringfence
EXTRA=driver=xen-netfront
setup copy
EXTRA=
setup copy-driver
check 'staging: configured' reload '[network]' 'mode = "staging"'
driven one 11
STAGED=512
check 'our driver: its pages are staged' wait_for 40 all_staged one
workloads staging-driver
gone one
kill $SERVE
check 'serve ends when it is told to' wait $SERVE
check 'the kernel has xen-netback' modprobe xen-netback
SCRIPT=vif-control
EXTRA=driver=xen-netfront
setup netback
EXTRA=
setup netback-driver
check_not 'dom0 has nothing to complain of' on dom0 "dmesg | grep -E 'BUG|WARNING|Oops|Call Trace'"
complete
