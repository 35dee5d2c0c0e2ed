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

# What the paper of the redesigned grants measured; `ringfence-bench seeds redesigned --xen` prints the rows.
SIZE=${SIZE:-8}
# Each guest stays on one processor: in a machine with two, guests ended by a triple fault, one of them before any window was
# there. An error of the emulator when a guest changes its processor is suspected.
PINNED=yes

# connected MODE OPTION...: 3 checks. A new daemon with this mode serves both guests, whose frontends have these options.
connected() {
    local mode=$1 each number=10
    shift
    CONFIGURATION="[network]\\nmode = \"$mode\"\\n"
    for each in one two; do on $each 'kill $(cat /tmp/attach.pid) 2>/dev/null; wait_for 20 test ! -e /sys/class/net/eth0'; done
    on net 'kill $(cat /tmp/serve.pid) 2>/dev/null; wait_for 20 test ! -e /proc/$(cat /tmp/serve.pid)'
    check "$mode $*: the daemon serves" serving
    for each in one two; do
        number=$((number + 1))
        on $each "ringfence attach --device 0 --name eth0 -v $* >>/tmp/attach.log 2>&1 & echo \$! >/tmp/attach.pid"
        check "$mode $*: $each has its interface" again_with_address $each $number ||
            note "$(on $each 'tail -n 5 /tmp/attach.log') $(on net 'tail -n 5 /tmp/serve.log')"
    done
}

# frames_of_driver: those that went through its interfaces, either way.
frames_of_driver() {
    on net 'cat /sys/class/net/vif*/statistics/[rt]x_packets' | awk '/^[0-9]/ { sum += $1 } END { print sum + 0 }'
}

uptime_ms() {
    awk '{ printf "%d", $1 * 1000 }' /proc/uptime
}

# spent NAME: processor time in ms.
spent() {
    awk "BEGIN { printf \"%d\", 1000 * $(cpu_seconds $1) }"
}

# split: time of the driver domain in user mode and in its kernel, in ticks of 10 ms, as the kernel has it. The hypervisor's
# work on its behalf is in both; `vm_exits` counts how often there was some, and `modes_of` measures it for the machine.
split() {
    on net 'head -n 1 /proc/stat' | tr -d '\r' | awk '/^cpu / { print $2 + $3, $4 + $7 + $8 }'
}

# uses: uses of the pages in both guests' windows so far, by `ringfence attach`: those that needed no grant operation, and
# those for which a page was issued.
uses() {
    local each
    for each in one two; do
        on $each ': >/tmp/attach.log; kill -USR1 $(cat /tmp/attach.pid); wait_for 5 grep windows /tmp/attach.log; cat /tmp/attach.log'
    done | tr -d '\r' | awk '/grant windows:/ { for (i = 1; i < NF; i++) { if ($i == "reused") reused += $(i + 1)
        if ($i == "issued") issued += $(i + 1) } } END { print reused + 0, issued + 0 }'
}

# measured EXPERIMENT SETUP FROM TO ADDRESS WAYS: 1 check, and a row. A packet between guests passes two interfaces.
measured() {
    local frames=$(frames_of_driver) net=$(spent net) one=$(spent one) two=$(spent two) ticks="$(split)" uses start counts
    uses="$(uses)"
    counting
    start=$(uptime_ms)
    modes_of transfer "$1, $2" $3 $4 $5 $SIZE
    start=$(($(uptime_ms) - start))
    counts=$(counters)
    set -- "$@" $ticks $(split) $uses $(uses)
    counts="$counts driver_domain_user_ms=$((($9 - $7) * 10)) driver_domain_kernel_ms=$(((${10} - $8) * 10)) $MODES"
    # A setup without windows has no such uses.
    [ $((${13} + ${14})) = 0 ] || counts="$counts reused=$((${13} - ${11})) not_reused=$((${14} - ${12}))"
    frames=$((($(frames_of_driver) - frames) / $6))
    row redesigned $1 $2 packet $frames $counts bytes=$((SIZE << 20)) ms=$start driver_domain_ms=$(($(spent net) - net)) \
        guests_ms=$(($(spent one) + $(spent two) - one - two))
    note "$1, $2: $frames packets, $counts, $start ms"
}

# setup NAME MODE OPTION...: 6 checks.
setup() {
    local name=$1
    shift
    connected "$@"
    measured transmit $name one net $ADDRESS 1
    measured receive $name net one 10.77.0.11 1
    measured guest-guest $name one two 10.77.0.12 2
}

guests_with window
before=$(free_memory)
stream_sum $SIZE
driver_domain '[network]\nmode = "map"\n'
attached_windows one 11
attached_windows two 12
setup map map
setup window-no-reuse window --windows --window-churn 1
setup window window --windows
operations=$(operations_of_driver)
check 'with windows no packet costs a grant operation of the driver domain' \
    on one "ping -c 20 -i 0.05 $ADDRESS"
is 'none of these' $(($(operations_of_driver) - operations)) 0
for each in one two net; do xl destroy $each; done
is 'the memory is free again' "$(wait_for 30 alone; free_memory)" "$before"
complete
