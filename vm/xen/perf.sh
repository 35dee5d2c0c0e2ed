# Helpers for scenarios that count what the hypervisor did. It has to be one that was built for that
# (`--debug-xen`).

# hypervisor_counters: prints the hypervisor's counts since `reset_hypervisor_counters`, as NAME=COUNT: grant
# hypercalls of all domains and their operations, all hypercalls, pages that windows issued and removed, TLB flushes
# for mappings, exits of HVM and PVH guests, and interrupts between processors. Fails if the hypervisor does not
# count.
hypervisor_counters() {
    xl dmesg -c >/dev/null
    xl debug-keys p
    xl dmesg | awk '
        function print_total(name) {
            match($0, /TOTAL\[ *[0-9]+\]/)
            printf "%s=%d ", name, substr($0, RSTART + 6, RLENGTH - 7)
            seen++
        }
        /grant calls / { print_total("grant_calls") }
        /grant maps / { print_total("maps") }
        /grant unmaps / { print_total("unmaps") }
        /grant copies / { print_total("copies") }
        / hypercalls .*TOTAL/ { print_total("hypercalls") }
        /grant windows: pages issued / { print_total("issues") }
        /grant windows: pages removed / { print_total("revokes") }
        /(^| )TLB flushes  / && !/windows/ { print_total("tlb_flushes") }
        / vmexits  / { print_total("vm_exits") }
        /#IPIs / { print_total("ipis") }
        END { if (seen < 7) exit 1 }'
}

# read_hypervisor_counters: sets COUNTS to these counts, MAPS, UNMAPS and COPIES to some of them, and OPERATIONS to
# the sum of the three.
read_hypervisor_counters() {
    local each
    COUNTS=$(hypervisor_counters) || { note 'the hypervisor does not count'; return 1; }
    for each in $COUNTS; do
        case $each in
            maps=*) MAPS=${each#*=} ;;
            unmaps=*) UNMAPS=${each#*=} ;;
            copies=*) COPIES=${each#*=} ;;
        esac
    done
    OPERATIONS=$((MAPS + UNMAPS + COPIES))
}

# daemon_counters: prints the daemon's counters and its processor time in ms, as NAME=COUNT; nothing without a daemon.
daemon_counters() {
    local name
    [ -e /proc/${SERVE:-none}/stat ] || return 0
    for name in syscalls notifications wakeups; do echo "$name=$(daemon_counter $name)"; done
    awk '{ sub(/.*\) /, ""); print "daemon_user_ms=" 10 * $12 "\ndaemon_kernel_ms=" 10 * $13 }' /proc/$SERVE/stat
}

# daemon_counters_since EARLIER: prints the differences to what `daemon_counters` printed EARLIER.
daemon_counters_since() {
    { echo "$1"; echo; daemon_counters; } | awk -F= '
        NF == 0 { later = 1 } NF && !later { before[$1] = $2 } NF && later { printf "%s=%d ", $1, $2 - before[$1] }'
}

# milliseconds SECONDS: prints an awk expression in seconds as milliseconds.
milliseconds() {
    awk "BEGIN { print int(1000 * ($1) + 0.5) }"
}

# reset_hypervisor_counters: sets the hypervisor's counts to zero.
reset_hypervisor_counters() {
    xl debug-keys P
}

# interface_frames INTERFACE: prints the number of frames that an interface received and sent.
interface_frames() {
    cat /sys/class/net/$1/statistics/rx_packets /sys/class/net/$1/statistics/tx_packets |
        awk '{ sum += $1 } END { print sum }'
}

# cpu_seconds_of_both: prints the processor time of dom0 and guest `one` together.
cpu_seconds_of_both() {
    xl list | awk '$1 == "Domain-0" || $1 == "one" { sum += $6 } END { print sum }'
}

# measure_network LABEL: checks transfers of 16 MiB each way between dom0 and guest `one`, and writes rows of their
# cost. Sets OPERATIONS (grant operations), FRAMES, USED (processor time of both in s), and EACH (operations of a
# packet of one slot). The length of the frames in bulk depends on the two kernels.
measure_network() {
    local label=$1 before bulk served frames=$(interface_frames vif$(domain_id one).0)
    served=$(daemon_counters)
    before=$(cpu_seconds_of_both)
    reset_hypervisor_counters
    check_transfer "$1, guest to dom0" one dom0 $ADDRESS 16
    check_transfer "$1, dom0 to guest" dom0 one 10.77.0.11 16
    read_hypervisor_counters
    served=$(daemon_counters_since "$served")
    USED=$(awk "BEGIN { printf \"%.1f\", $(cpu_seconds_of_both) - $before }")
    FRAMES=$(($(interface_frames vif$(domain_id one).0) - frames))
    write_row staging bulk $label packet $FRAMES $COUNTS cpu_ms=$(milliseconds $USED) $served
    note "$1: $OPERATIONS grant operations for 32 MiB in $FRAMES frames," \
        "$(ratio $OPERATIONS $FRAMES) each; processor time $USED s"
    frames=$(interface_frames vif$(domain_id one).0)
    reset_hypervisor_counters
    check "$1: packets of one slot" on one "ping -c 300 -i 0.01 -W 5 -s 1000 $ADDRESS"
    bulk=$OPERATIONS
    read_hypervisor_counters
    frames=$(($(interface_frames vif$(domain_id one).0) - frames))
    write_row staging one-slot $label packet $frames $COUNTS
    EACH=$(ratio $OPERATIONS $frames) OPERATIONS=$bulk
    note "$1: $EACH grant operations for a packet of one slot"
}

# ratio A B: prints A / B.
ratio() {
    awk "BEGIN { printf \"%.2f\", $1 / ($2 + 0.001) }"
}

# send_stream FROM TO ADDRESS [--length]: sends SIZE MiB by TCP, and compares their SHA-256, or the length alone.
send_stream() {
    local expected=$((SIZE << 20))
    [ -n "${4:-}" ] || expected=$(stream_sum $SIZE)
    PORT=$((${PORT:-9000} + 1))
    on $2 "start_receiver $PORT ${4:-}" && ON_LIMIT=600 on $1 "traffic send $3 $PORT $SIZE" &&
        [ "$(on $2 "received_stream $PORT")" = "$expected" ]
}

# write_row SEED EXPERIMENT SETUP UNIT UNITS NAME=COUNT...: appends a line to the run's file of rows, which
# `ringfence-bench seeds SEED --xen FILE` prints: the cost of that many units (packets, requests) in this setup.
write_row() {
    local line="{\"seed\":\"$1\",\"experiment\":\"$2\",\"setup\":\"$3\",\"unit\":\"$4\",\"units\":$5,\"counts\":{" each comma=
    shift 5
    for each in "$@"; do
        line="$line$comma\"${each%%=*}\":${each#*=}"
        comma=,
    done
    echo "$line}}" >>/share/rows.json
}

# modes_of COMMAND...: runs the command, and returns its status. Sets MODES to the time that the machine's processors
# spent in the hypervisor, in kernels and in programs of all domains, as NAME=MS, sampled by the emulator
# (`tools/vm-lab/src/modes.rs`).
modes_of() {
    local status
    rm -f /share/sampled
    : >/share/sampling
    "$@"
    status=$?
    rm -f /share/sampling
    wait_for 10 test -s /share/sampled
    MODES=$(cat /share/sampled)
    return $status
}
