# title: receive, transmit and guest to guest in a driver domain: original grants, windows without reuse, windows
# group: window-long
# set: name
# machine: xen-pvh
# limit: 600
# driver: window
# hypervisor: debug
# sampled: modes

. /vm/xen/window.sh
. /vm/xen/perf.sh

# Measurements of the paper on redesigned grants; `ringfence-bench seeds redesigned --xen` prints the rows.
SIZE=${SIZE:-8}
# Each guest stays on one processor: in a machine with two, guests ended by a triple fault, one of them before any window was
# there. An error of the emulator when a guest changes its processor is suspected.
PINNED=yes

# connect_guests MODE OPTION...: checks that a new daemon with this mode serves both guests, whose frontends have
# these options.
connect_guests() {
    local mode=$1 each number=10
    shift
    for each in one two; do on $each 'kill $(cat /tmp/attach.pid) 2>/dev/null; wait_for 20 test ! -e /sys/class/net/eth0'; done
    on net 'kill $(cat /tmp/serve.pid) 2>/dev/null; wait_for 20 test ! -e /proc/$(cat /tmp/serve.pid)'
    check "$mode $*: the daemon serves" start_driver_daemon "[network]\\nmode = \"$mode\"\\n"
    for each in one two; do
        number=$((number + 1))
        on $each "ringfence attach --device 0 --name eth0 -v $* >>/tmp/attach.log 2>&1 & echo \$! >/tmp/attach.pid"
        check "$mode $*: $each has its interface" configure_network $each $number ||
            note "$(on $each 'tail -n 5 /tmp/attach.log') $(on net 'tail -n 5 /tmp/serve.log')"
    done
}

# driver_domain_frames: prints the number of frames that passed the driver domain's interfaces.
driver_domain_frames() {
    on net 'cat /sys/class/net/vif*/statistics/[rt]x_packets' | awk '/^[0-9]/ { sum += $1 } END { print sum + 0 }'
}

uptime_ms() {
    awk '{ printf "%d", $1 * 1000 }' /proc/uptime
}

# cpu_milliseconds NAME: prints the processor time of a domain in ms.
cpu_milliseconds() {
    awk "BEGIN { printf \"%d\", 1000 * $(cpu_seconds $1) }"
}

# driver_domain_ticks: prints the driver domain's time in user mode and in its kernel, in ticks of 10 ms, by its
# kernel. The hypervisor's work for it is part of both; `vm_exits` counts the exits, and `modes_of` measures that work
# for the machine.
driver_domain_ticks() {
    on net 'head -n 1 /proc/stat' | tr -d '\r' | awk '/^cpu / { print $2 + $3, $4 + $7 + $8 }'
}

# window_uses: prints the uses of window pages of both guests so far, by `ringfence attach`: those without a grant
# operation, and those for which a page was issued.
window_uses() {
    local each
    for each in one two; do
        on $each ': >/tmp/attach.log; kill -USR1 $(cat /tmp/attach.pid); wait_for 5 grep windows /tmp/attach.log; cat /tmp/attach.log'
    done | tr -d '\r' | awk '/grant windows:/ { for (i = 1; i < NF; i++) { if ($i == "reused") reused += $(i + 1)
        if ($i == "issued") issued += $(i + 1) } } END { print reused + 0, issued + 0 }'
}

# measure_stream EXPERIMENT SETUP FROM TO ADDRESS WAYS: checks a stream, and writes a row of its cost. WAYS is the
# number of interfaces that a packet passes.
measure_stream() {
    local frames=$(driver_domain_frames) net=$(cpu_milliseconds net) one=$(cpu_milliseconds one) two=$(cpu_milliseconds two) ticks="$(driver_domain_ticks)" uses start counts
    uses="$(window_uses)"
    reset_hypervisor_counters
    start=$(uptime_ms)
    modes_of check_transfer "$1, $2" $3 $4 $5 $SIZE
    start=$(($(uptime_ms) - start))
    counts=$(hypervisor_counters)
    set -- "$@" $ticks $(driver_domain_ticks) $uses $(window_uses)
    counts="$counts driver_domain_user_ms=$((($9 - $7) * 10)) driver_domain_kernel_ms=$(((${10} - $8) * 10)) $MODES"
    # A setup without windows has no such uses.
    [ $((${13} + ${14})) = 0 ] || counts="$counts reused=$((${13} - ${11})) not_reused=$((${14} - ${12}))"
    frames=$((($(driver_domain_frames) - frames) / $6))
    write_row redesigned $1 $2 packet $frames $counts bytes=$((SIZE << 20)) ms=$start driver_domain_ms=$(($(cpu_milliseconds net) - net)) \
        guests_ms=$(($(cpu_milliseconds one) + $(cpu_milliseconds two) - one - two))
    note "$1, $2: $frames packets, $counts, $start ms"
}

# measure_setup NAME MODE OPTION...: measures streams in each direction with this mode and these options.
measure_setup() {
    local name=$1
    shift
    connect_guests "$@"
    measure_stream transmit $name one net $ADDRESS 1
    measure_stream receive $name net one 10.77.0.11 1
    measure_stream guest-guest $name one two 10.77.0.12 2
}

guests_with window
before=$(free_memory)
stream_sum $SIZE
create_driver_domain '[network]\nmode = "map"\n'
create_guest_with_windows one 11
create_guest_with_windows two 12
measure_setup map map
measure_setup window-no-reuse window --windows --window-churn 1
measure_setup window window --windows
operations=$(driver_domain_operations)
check 'with windows no packet costs a grant operation of the driver domain' \
    on one "ping -c 20 -i 0.05 $ADDRESS"
is 'none of these' $(($(driver_domain_operations) - operations)) 0
for each in one two net; do xl destroy $each; done
is 'the memory is free again' "$(wait_for 30 only_dom0_is_left; free_memory)" "$before"
complete_scenario
