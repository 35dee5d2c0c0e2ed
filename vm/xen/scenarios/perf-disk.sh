# title: grant operations a disk request, counted by the hypervisor, for one to six guests: serve in each mode, and xen-blkback
# set: all
# machine: xen-netback
# limit: 400
# hypervisor: debug

. /vm/xen/perf.sh

ALL='one two three four five six'

# requests_of NAME...: reads and writes that the guests' kernels have sent to their disks.
requests_of() {
    local name
    for name in "$@"; do on $name 'cat /sys/block/xvda/stat'; done | awk 'NF > 10 { sum += $1 + $5 } END { print sum + 0 }'
}

# loaded NAME...: the same load in all these guests at once, each sector checked.
loaded() {
    local name status=0
    for name in "$@"; do load_begins $name /dev/xvda --seconds 3 --mebibytes 8 --threads 4 --largest 64; done
    for name in "$@"; do load_ends $name || status=1; done
    return $status
}

# measured SETUP NAME...: 2 checks. What load in these guests costs the hypervisor, on disks that have seen load before;
# in REQUESTS, MAPS, UNMAPS and COPIES, and in EACH the operations of one request.
measured() {
    local setup=$1 guests before used served
    shift
    guests=$#
    before=$(requests_of "$@") used=$(cpu_seconds Domain-0) served=$(daemon)
    counting
    check "$setup, $guests: every sector is as it was written" loaded "$@"
    count
    served=$(daemon_since "$served")
    used=$(cpu_used Domain-0 $used)
    REQUESTS=$(($(requests_of "$@") - before))
    EACH=$(ratio $OPERATIONS $REQUESTS)
    check "$setup, $guests: that was hundreds of requests ($REQUESTS)" test $REQUESTS -gt 300
    note "$setup, $guests: $REQUESTS requests; each $(ratio $MAPS $REQUESTS) maps, $(ratio $UNMAPS $REQUESTS) unmaps," \
        "$(ratio $COPIES $REQUESTS) copies, $(ratio "1000 * $used" $REQUESTS) ms of dom0; $served"
    row persistent "guests-$guests" $setup request $REQUESTS $COUNTS dom0_ms=$(milliseconds $used) $served
}

# curve SETUP: 11 checks. Six guests; load in one, two, four and all of them.
curve() {
    local name
    check "$1: six guests have disks" created $1
    check "$1: these have seen load" loaded $ALL
    measured $1 one
    FIRST=$EACH
    measured $1 one two
    measured $1 one two three four
    measured $1 $ALL
    for name in $ALL; do xl destroy $name; done
    check "$1: they are gone" wait_for 30 alone
}

created() {
    local name line loop=0
    for name in $ALL; do
        line="disk=[$(disk xvda $name)]"
        [ $1 != xen-blkback ] ||
            line="disk=['vdev=xvda,format=raw,backendtype=phy,script=block-control,target=/dev/loop$loop']"
        loop=$((loop + 1))
        guest $name "$line" || return 1
    done
    for name in $ALL; do has_disk $name xvda || return 1; done
}

alone() {
    [ $(xl list | wc -l) = 2 ]
}

loops() {
    local name loop=0
    modprobe loop max_loop=8
    for name in $ALL; do
        losetup /dev/loop$loop $DISKS/$name || return 1
        loop=$((loop + 1))
    done
}

configured_for() {
    reload '[disks]' "mode = \"$1\"" "paths = [\"$DISKS\"]"
}

use_disks
unset RAMDISK
MEMORY=128
for name in $ALL; do image $name 8; done
for mode in persistent map copy; do
    check "$mode: configured" configured_for $mode
    curve $mode
    eval each_$mode=$FIRST
done
is 'copy: no map' $MAPS 0
check 'copy: a copy operation a page' test $COPIES -gt $REQUESTS
kill $SERVE
check 'serve ends when it is told to' wait $SERVE
check 'the kernel has xen-blkback' modprobe xen-blkback
check 'dom0 has block devices' loops
curve xen-blkback
check 'map costs more than one map and one unmap a request' awk "BEGIN { exit !($each_map > 2) }"
check 'persistent costs no more than xen-blkback does' awk "BEGIN { exit !($each_persistent <= 0.05 + $FIRST) }"
complete
