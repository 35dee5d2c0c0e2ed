# Helpers for scenarios that count what the hypervisor did. It has to be one that was built for that
# (`--debug-xen`).

# counters: what the hypervisor counted since `counting`, NAME=COUNT each: grant hypercalls of all domains and their
# operations, all hypercalls, pages that windows issued and removed, TLB flushes for mappings, exits of HVM and PVH guests
# to the hypervisor, and interrupts between processors.
counters() {
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

# count: the same, in COUNTS; and of it MAPS, UNMAPS and COPIES, with their sum in OPERATIONS.
count() {
    local each
    COUNTS=$(counters) || { note 'the hypervisor does not count'; return 1; }
    for each in $COUNTS; do
        case $each in
            maps=*) MAPS=${each#*=} ;;
            unmaps=*) UNMAPS=${each#*=} ;;
            copies=*) COPIES=${each#*=} ;;
        esac
    done
    OPERATIONS=$((MAPS + UNMAPS + COPIES))
}

# daemon: what the daemon counted so far, and its processor time in ms, NAME=COUNT each. Without a daemon nothing.
daemon() {
    local name
    [ -e /proc/${SERVE:-none}/stat ] || return 0
    for name in syscalls notifications wakeups; do echo "$name=$(disk_counter $name)"; done
    awk '{ sub(/.*\) /, ""); print "daemon_user_ms=" 10 * $12 "\ndaemon_kernel_ms=" 10 * $13 }' /proc/$SERVE/stat
}

# daemon_since EARLIER: the same, less what it had counted then.
daemon_since() {
    { echo "$1"; echo; daemon; } | awk -F= '
        NF == 0 { later = 1 } NF && !later { before[$1] = $2 } NF && later { printf "%s=%d ", $1, $2 - before[$1] }'
}

# milliseconds SECONDS
milliseconds() {
    awk "BEGIN { print int(1000 * ($1) + 0.5) }"
}

# counting: starts at zero.
counting() {
    xl debug-keys P
}

# passed INTERFACE: the frames that went through it, either way.
passed() {
    cat /sys/class/net/$1/statistics/rx_packets /sys/class/net/$1/statistics/tx_packets |
        awk '{ sum += $1 } END { print sum }'
}

both_used() {
    xl list | awk '$1 == "Domain-0" || $1 == "one" { sum += $6 } END { print sum }'
}

# counted LABEL: 3 checks. What 16 MiB each way between dom0 and guest `one` cost the hypervisor in grant
# operations, and both domains in processor time; in OPERATIONS, FRAMES and USED. These frames are as long as the
# guest's kernel and dom0's make them; so then, in EACH, the operations a packet of one slot, to and fro.
counted() {
    local label=$1 before bulk served frames=$(passed vif$(domain one).0)
    served=$(daemon)
    before=$(both_used)
    counting
    transfer "$1, guest to dom0" one dom0 $ADDRESS 16
    transfer "$1, dom0 to guest" dom0 one 10.77.0.11 16
    count
    served=$(daemon_since "$served")
    USED=$(awk "BEGIN { printf \"%.1f\", $(both_used) - $before }")
    FRAMES=$(($(passed vif$(domain one).0) - frames))
    row staging bulk $label packet $FRAMES $COUNTS cpu_ms=$(milliseconds $USED) $served
    note "$1: $OPERATIONS grant operations for 32 MiB in $FRAMES frames," \
        "$(ratio $OPERATIONS $FRAMES) each; processor time $USED s"
    frames=$(passed vif$(domain one).0)
    counting
    check "$1: packets of one slot" on one "ping -c 300 -i 0.01 -W 5 -s 1000 $ADDRESS"
    bulk=$OPERATIONS
    count
    frames=$(($(passed vif$(domain one).0) - frames))
    row staging one-slot $label packet $frames $COUNTS
    EACH=$(ratio $OPERATIONS $frames) OPERATIONS=$bulk
    note "$1: $EACH grant operations for a packet of one slot"
}

ratio() {
    awk "BEGIN { printf \"%.2f\", $1 / ($2 + 0.001) }"
}

# row SEED EXPERIMENT SETUP UNIT UNITS NAME=COUNT...: a line of the run's file of rows, which `ringfence-bench seeds SEED
# --xen FILE` prints: what so many units (packets, requests) of this setup cost in all.
row() {
    local line="{\"seed\":\"$1\",\"experiment\":\"$2\",\"setup\":\"$3\",\"unit\":\"$4\",\"units\":$5,\"counts\":{" each comma=
    shift 5
    for each in "$@"; do
        line="$line$comma\"${each%%=*}\":${each#*=}"
        comma=,
    done
    echo "$line}}" >>/share/rows.json
}

# modes_of COMMAND...: runs it, and has in MODES the time of the machine's processors in the hypervisor, the kernels and the
# programs of all domains, NAME=MS each, as the emulator sampled it (`tools/vm-lab/src/modes.rs`). The status is the command's.
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
