# title: processor time of dom0 a packet on a bridge, to dom0 and from guest to guest: serve by xen-netback
# set: name
# machine: xen-netback
# limit: 600
# sampled: modes
# driver: netfront

# With `--count-instructions` a millisecond of processor time is a million instructions, which nothing else on the computer
# changes. `xl list` rounds to 100 ms, so streams are long. Receivers compare the length alone; other scenarios compare the bytes.

. /vm/xen/perf.sh

SIZE=${SIZE:-64}
PINGS=${PINGS:-20000}

# send_pings ADDRESS: sends frames of 64 bytes from guest one, each of which is answered.
send_pings() {
    ON_LIMIT=600 on one "ping -q -c $PINGS -i 0.001 -W 5 -s 22 $1 | grep ' 0% packet loss'"
}

# measure BACKEND WORKLOAD COMMAND...: checks a command, and writes a row of dom0's time. Keeps the time for the ratio.
measure() {
    local backend=$1 workload=$2 dom0 served frames
    shift 2
    frames=$(interface_frames vif$(domain_id one).0) served=$(daemon_counters) dom0=$(cpu_seconds Domain-0)
    check "$backend: $workload" modes_of "$@"
    dom0=$(milliseconds "$(cpu_seconds Domain-0) - $dom0") served=$(daemon_counters_since "$served")
    frames=$(($(interface_frames vif$(domain_id one).0) - frames))
    note "$backend, $workload: $dom0 ms of dom0, $frames frames at its interface; the machine's processor: $MODES; $served"
    write_row bridge $workload $backend run 1 dom0_ms=$dom0 frames=$frames $served
    echo $dom0 >/tmp/$backend.$workload
}

# measure_backend BACKEND: measures all workloads with two new guests.
measure_backend() {
    create_networked_guest one 11
    create_networked_guest two 12
    check "$1: segments are made in the guest" on one 'ethtool -K eth0 tso off gso off'
    measure $1 mtu1500-to-dom0 send_stream one dom0 $ADDRESS --length
    measure $1 mtu1500-to-guest send_stream one two 10.77.0.12 --length
    measure $1 small-to-dom0 send_pings $ADDRESS
    measure $1 small-to-guest send_pings 10.77.0.12
    on one 'ethtool -K eth0 gso on tso on'
    measure $1 tso-to-dom0 send_stream one dom0 $ADDRESS --length
    measure $1 tso-to-guest send_stream one two 10.77.0.12 --length
    check_destruction one
    check_destruction two
}

guests_with tools driver
EXTRA=driver=xen-netfront
use_ringfence
measure_backend serve
kill $SERVE
check 'serve ends when it is told to' wait $SERVE
ip link delete xenbr0
use_netback
measure_backend netback
for each in /tmp/netback.*; do
    workload=${each#/tmp/netback.}
    note "serve by xen-netback, $workload: $(ratio $(cat /tmp/serve.$workload) $(cat $each))"
done
check_not 'dom0 has nothing to complain of' on dom0 "dmesg | grep -E 'BUG|WARNING|Oops|Call Trace'"
complete_scenario
