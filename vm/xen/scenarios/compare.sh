# title: processor time for the same transfers, ringfence serve and the kernel's xen-netback in turn
# set: all
# machine: xen-netback
# limit: 150

# measure BACKEND: 4 checks. Notes seconds, and the processor time of dom0 and of the guest together, for
# 32 MiB each way; they are in the variables to_BACKEND and from_BACKEND.
measure() {
    local before used
    networked one 11
    before=$(both_used)
    transfer "$1, guest to dom0" one dom0 $ADDRESS 32
    used=$(spent $before)
    eval from_$1=$used
    before=$(both_used)
    transfer "$1, dom0 to guest" dom0 one 10.77.0.11 32
    eval to_$1=$(spent $before)
    note "$1: processor time $used s from the guest, $(spent $before) s to it"
}

both_used() {
    xl list | awk '$1 == "Domain-0" || $1 == "one" { sum += $6 } END { print sum }'
}

spent() {
    awk "BEGIN { printf \"%.1f\", $(both_used) - $1 }"
}

ratio() {
    awk "BEGIN { printf \"%.2f\", $1 / ($2 + 0.01) }"
}

use_ringfence
stream_sum 32
measure ringfence
gone one
kill $SERVE
check 'serve ends when it is told to' wait $SERVE
check 'the kernel has xen-netback' modprobe xen-netback
SCRIPT=vif-control
measure netback
note "ringfence to netback, under emulation: $(ratio $from_ringfence $from_netback) from the guest," \
    "$(ratio $to_ringfence $to_netback) to it"
complete
