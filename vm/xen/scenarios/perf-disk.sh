# title: grant operations a disk request, counted by the hypervisor, for one to six guests: serve in each mode, and xen-blkback
# set: all
# machine: xen-netback
# limit: 400
# hypervisor: debug

. /vm/xen/perf.sh

ALL='one two three four five six'

# guest_requests NAME...: prints the number of requests that the guests' kernels have sent to their disks.
guest_requests() {
    local name
    for name in "$@"; do on $name 'cat /sys/block/xvda/stat'; done | awk 'NF > 10 { sum += $1 + $5 } END { print sum + 0 }'
}

# run_load_in NAME...: puts the same load on the disks of all these guests at once, and compares each sector.
run_load_in() {
    local name status=0
    for name in "$@"; do start_load $name /dev/xvda --seconds 3 --mebibytes 8 --threads 4 --largest 64; done
    for name in "$@"; do finish_load $name || status=1; done
    return $status
}

# measure_load SETUP NAME...: checks load in these guests, on disks that had load before, and writes a row of its
# cost. Sets REQUESTS, MAPS, UNMAPS, COPIES, and EACH (operations of one request).
measure_load() {
    local setup=$1 guests before used served
    shift
    guests=$#
    before=$(guest_requests "$@") used=$(cpu_seconds Domain-0) served=$(daemon_counters)
    reset_hypervisor_counters
    check "$setup, $guests: every sector is as it was written" run_load_in "$@"
    read_hypervisor_counters
    served=$(daemon_counters_since "$served")
    used=$(cpu_used Domain-0 $used)
    REQUESTS=$(($(guest_requests "$@") - before))
    EACH=$(ratio $OPERATIONS $REQUESTS)
    check "$setup, $guests: that was hundreds of requests ($REQUESTS)" test $REQUESTS -gt 300
    note "$setup, $guests: $REQUESTS requests; each $(ratio $MAPS $REQUESTS) maps, $(ratio $UNMAPS $REQUESTS) unmaps," \
        "$(ratio $COPIES $REQUESTS) copies, $(ratio "1000 * $used" $REQUESTS) ms of dom0; $served"
    write_row persistent "guests-$guests" $setup request $REQUESTS $COUNTS dom0_ms=$(milliseconds $used) $served
}

# measure_curve SETUP: measures load in one, two, four and all of six guests.
measure_curve() {
    local name
    check "$1: six guests have disks" create_guests $1
    check "$1: these have seen load" run_load_in $ALL
    measure_load $1 one
    FIRST=$EACH
    measure_load $1 one two
    measure_load $1 one two three four
    measure_load $1 $ALL
    for name in $ALL; do xl destroy $name; done
    check "$1: they are gone" wait_for 30 only_dom0_is_left
}

create_guests() {
    local name line loop=0
    for name in $ALL; do
        line="disk=[$(disk_line xvda $name)]"
        [ $1 != xen-blkback ] ||
            line="disk=['vdev=xvda,format=raw,backendtype=phy,script=block-control,target=/dev/loop$loop']"
        loop=$((loop + 1))
        create_guest $name "$line" || return 1
    done
    for name in $ALL; do has_disk $name xvda || return 1; done
}

only_dom0_is_left() {
    [ $(xl list | wc -l) = 2 ]
}

create_loop_devices() {
    local name loop=0
    modprobe loop max_loop=8
    for name in $ALL; do
        losetup /dev/loop$loop $DISKS/$name || return 1
        loop=$((loop + 1))
    done
}

configure_mode() {
    reload_daemon '[disks]' "mode = \"$1\"" "paths = [\"$DISKS\"]"
}

use_disks
unset RAMDISK MEMORY
for name in $ALL; do create_image $name 8; done
for mode in persistent map copy; do
    check "$mode: configured" configure_mode $mode
    measure_curve $mode
    eval each_$mode=$FIRST
done
is 'copy: no map' $MAPS 0
check 'copy: a copy operation a page' test $COPIES -gt $REQUESTS
kill $SERVE
check 'serve ends when it is told to' wait $SERVE
check 'the kernel has xen-blkback' modprobe xen-blkback
check 'dom0 has block devices' create_loop_devices
measure_curve xen-blkback
check 'map costs more than one map and one unmap a request' awk "BEGIN { exit !($each_map > 2) }"
check 'persistent costs no more than xen-blkback does' awk "BEGIN { exit !($each_persistent <= 0.05 + $FIRST) }"
complete_scenario
