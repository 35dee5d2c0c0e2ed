# Helpers for scenarios that count what the hypervisor did. It has to be one that was built for that
# (`--debug-xen`).

# hypervisor_counts: map, unmap and copy operations, and hypercalls, of all domains since `counting`, as the hypervisor's
# debug key `p` tells.
hypervisor_counts() {
    xl dmesg -c >/dev/null
    xl debug-keys p
    xl dmesg | awk '/ (grant maps|grant unmaps|grant copies|hypercalls) .*TOTAL/ {
        match($0, /TOTAL\[ *[0-9]+\]/)
        kind = / maps / ? 0 : / unmaps / ? 1 : / copies / ? 2 : 3
        count[kind] = substr($0, RSTART + 6, RLENGTH - 7) + 0
        seen++
    } END { if (seen != 4) exit 1; print count[0], count[1], count[2], count[3] }'
}

# grants_done: the operations of these.
grants_done() {
    hypervisor_counts | awk '{ print $1 + $2 + $3 }'
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

# counts_of MAPS UNMAPS COPIES HYPERCALLS: in COUNTS as `row` takes them, and in OPERATIONS those with grants.
counts_of() {
    COUNTS="maps=$1 unmaps=$2 copies=$3 hypercalls=$4" OPERATIONS=$(($1 + $2 + $3))
}

# counted LABEL: 3 checks. What 16 MiB each way between dom0 and guest `one` cost the hypervisor in grant
# operations, and both domains in processor time; in OPERATIONS, FRAMES and USED. These frames are as long as the
# guest's kernel and dom0's make them; so then, in EACH, the operations a packet of one slot, to and fro.
counted() {
    local label=$1 before kinds bulk frames=$(passed vif$(domain one).0)
    before=$(both_used)
    counting
    transfer "$1, guest to dom0" one dom0 $ADDRESS 16
    transfer "$1, dom0 to guest" dom0 one 10.77.0.11 16
    kinds=$(hypervisor_counts)
    USED=$(awk "BEGIN { printf \"%.1f\", $(both_used) - $before }")
    FRAMES=$(($(passed vif$(domain one).0) - frames))
    counts_of $kinds
    row staging bulk $label packet $FRAMES $COUNTS cpu_ms=$(milliseconds $USED)
    note "$1: $OPERATIONS grant operations for 32 MiB in $FRAMES frames," \
        "$(ratio $OPERATIONS $FRAMES) each; processor time $USED s"
    frames=$(passed vif$(domain one).0)
    counting
    check "$1: packets of one slot" on one "ping -c 300 -i 0.01 -W 5 -s 1000 $ADDRESS"
    kinds=$(hypervisor_counts) frames=$(($(passed vif$(domain one).0) - frames))
    bulk=$OPERATIONS
    counts_of $kinds
    row staging one-slot $label packet $frames $COUNTS
    EACH=$(ratio $OPERATIONS $frames) OPERATIONS=$bulk
    note "$1: $EACH grant operations for a packet of one slot"
}

ratio() {
    awk "BEGIN { printf \"%.2f\", $1 / ($2 + 0.001) }"
}

# counters: what the hypervisor counted since `counting`, NAME=COUNT each: grant hypercalls of all domains and their
# operations, pages that windows issued and removed, TLB flushes for mappings, exits of HVM and PVH guests to the hypervisor, and
# interrupts between processors.
counters() {
    xl dmesg -c >/dev/null
    xl debug-keys p
    xl dmesg | awk '
        function total() { match($0, /TOTAL\[ *[0-9]+\]/); return substr($0, RSTART + 6, RLENGTH - 7) + 0 }
        /grant calls / { print "grant_calls=" total() }
        /grant maps / { print "maps=" total() }
        /grant unmaps / { print "unmaps=" total() }
        /grant copies / { print "copies=" total() }
        /grant windows: pages issued / { print "issues=" total() }
        /grant windows: pages removed / { print "revokes=" total() }
        /(^| )TLB flushes  / && !/windows/ { print "tlb_flushes=" total() }
        / vmexits  / { print "vm_exits=" total() }
        /#IPIs / { print "ipis=" total() }' | tr '\n' ' '
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
