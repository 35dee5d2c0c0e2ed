# title: processor time for the same transfers, ringfence serve and the kernel's xen-netback in turn
# set: all
# machine: xen-netback
# limit: 150

# measure_transfers BACKEND: checks 32 MiB each way, and notes the processor time of dom0 and guest together. Sets
# to_BACKEND and from_BACKEND.
measure_transfers() {
    local before used
    create_networked_guest one 11
    before=$(cpu_seconds_of_both)
    check_transfer "$1, guest to dom0" one dom0 $ADDRESS 32
    used=$(cpu_seconds_since $before)
    eval from_$1=$used
    before=$(cpu_seconds_of_both)
    check_transfer "$1, dom0 to guest" dom0 one 10.77.0.11 32
    eval to_$1=$(cpu_seconds_since $before)
    note "$1: processor time $used s from the guest, $(cpu_seconds_since $before) s to it"
}

cpu_seconds_of_both() {
    xl list | awk '$1 == "Domain-0" || $1 == "one" { sum += $6 } END { print sum }'
}

cpu_seconds_since() {
    awk "BEGIN { printf \"%.1f\", $(cpu_seconds_of_both) - $1 }"
}

ratio() {
    awk "BEGIN { printf \"%.2f\", $1 / ($2 + 0.01) }"
}

use_ringfence
stream_sum 32
measure_transfers ringfence
check_destruction one
kill $SERVE
check 'serve ends when it is told to' wait $SERVE
check 'the kernel has xen-netback' modprobe xen-netback
SCRIPT=vif-control
measure_transfers netback
note "ringfence to netback, under emulation: $(ratio $from_ringfence $from_netback) from the guest," \
    "$(ratio $to_ringfence $to_netback) to it"
complete_scenario
