# Checks of disks, and helpers for them.

DISKS=/run/disks

# use_disks [LINE...]: checks that `ringfence serve` runs, with these lines in its configuration, and that the kernel
# has no backend loaded. Files of disks are in $DISKS.
use_disks() {
    check_not 'the kernel has no backend loaded' grep -E '^xen_(netback|blkback) ' /proc/modules
    mkdir -p $DISKS && mount -t tmpfs disks $DISKS
    guests_with tools
    write_configuration "$@"
    configured=$(cat /tmp/serve.toml)
    case $configured in *'[disks]'*) ;; *) configured="$configured
[disks]" ;; esac
    echo "$configured" | sed "s#^\[disks\]#[disks]\npaths = [\"/dev\", \"$DISKS\"]#" >/tmp/serve.toml
    check 'ringfence serve is ready' start_daemon || give_up 'without a backend there is nothing to see'
}

# create_image NAME MEBIBYTES: creates an empty file for a disk.
create_image() {
    rm -f $DISKS/$1 && truncate -s ${2}M $DISKS/$1
}

# disk_line VDEV IMAGE [MORE]: prints one disk of a guest's configuration, a file in $DISKS.
disk_line() {
    printf "'vdev=%s,format=raw%s,backendtype=phy,script=block-ringfence,target=%s/%s'" \
        $1 "${3:+,$3}" $DISKS $2
}

# create_guest_with_disk NAME IMAGE [LINE...]: checks that a guest starts and uses the image as xvda. Ends the
# scenario otherwise.
create_guest_with_disk() {
    local name=$1 image=$2
    shift 2
    check "guest $name is created" create_guest $name "disk=[$(disk_line xvda $image)]" "$@" ||
        give_up "$(tail -n 3 /var/log/xen/*.log /share/serve-$SCENARIO.log)"
    check "$name has a disk" has_disk $name xvda || give_up "$(ringfence status)"
}

# has_disk NAME VDEV: waits until a guest takes commands and has the disk.
has_disk() {
    guest_ready $1 && on $1 "load_modules crc32c_generic ext4 && wait_for 20 test -b /dev/$2"
}

# vbd_path NAME [VDEV_NUMBER]: prints the path of a disk (xvda by default) below `backend` and `device`.
vbd_path() {
    echo vbd/$(domain_id $1)/${2:-51712}
}

# disk_connected NAME [VDEV_NUMBER]: succeeds if both ends of the disk are connected.
disk_connected() {
    key_is $BACKEND/$(vbd_path $1 ${2:-})/state 4 &&
        key_is /local/domain/$(domain_id $1)/device/vbd/${2:-51712}/state 4
}

# daemon_counter NAME: prints the sum of the daemon's counters of that name: of all devices and rings, and of grants.
daemon_counter() {
    ringfence status --json | grep -o "\"$1\": *[0-9]*" | awk '{ sum += $NF } END { print sum + 0 }'
}

# run_load NAME ARGUMENT...: puts load on a disk in a guest, and compares every sector. Prints the numbers of
# requests.
run_load() {
    local name=$1 told
    shift
    told=$(ON_LIMIT=120 on $name "traffic load $* 2>&1") || { echo "$told"; return 1; }
    echo "reads, writes, longest in ms: $told"
}

# start_load NAME ARGUMENT...: starts the same load in the background.
start_load() {
    local name=$1
    shift
    on $name "rm -f /tmp/load*; { traffic load $* >/tmp/load.log 2>&1; echo \$? >/tmp/load.status; } &"
}
# finish_load NAME: waits for the end of that load, and returns its status.
finish_load() {
    ON_LIMIT=150 on $1 'wait_for 140 test -s /tmp/load.status; cat /tmp/load.log; exit $(cat /tmp/load.status)'
}

# check_load_costs_no_operation LABEL NAME ARGUMENT...: checks that load costs no map, unmap or copy operation, by the
# daemon's counters, on a disk that had load before. Tries up to three times: a queue may meet new pages, and the
# daemon unmaps pages that were long not used.
check_load_costs_no_operation() {
    local label=$1 name=$2 before requests hits tries=0 status=0
    shift 2
    while [ $tries -lt 3 ] && [ $status = 0 ]; do
        tries=$((tries + 1))
        before="$(grant_counters)" requests=$(disk_requests) hits=$(daemon_counter persistent_hits)
        run_load $name "$@"
        status=$?
        note "$label: $(($(disk_requests) - requests)) requests, $(($(daemon_counter persistent_hits) - hits)) pages found mapped"
        [ "$(grant_counters)" != "$before" ] || break
    done
    is "$label" $status 0
    is "$label: its maps, unmaps and copies" "$(grant_counters)" "$before"
}

# grant_counters: prints the daemon's counts of map, unmap and copy operations.
grant_counters() {
    echo "$(daemon_counter grant_maps) $(daemon_counter grant_unmaps) $(daemon_counter grant_copies)"
}

# disk_requests: prints the number of requests that the daemon served.
disk_requests() {
    echo $(($(daemon_counter reads) + $(daemon_counter writes)))
}

# save_and_restore NAME: saves a guest to a file in $DISKS, and restores it.
save_and_restore() {
    xl save $1 $DISKS/$1.save && xl restore $DISKS/$1.save && rm $DISKS/$1.save && find_console $1
}

# create_four_queue_guest NAME IMAGE [LINE...]: checks that a guest starts whose disk has as many queues as are
# offered, up to four.
create_four_queue_guest() {
    MEMORY=320 VCPUS=4 EXTRA='xen_blkfront.max_ring_page_order=2'
    create_guest_with_disk "$@"
    MEMORY=192
    unset VCPUS EXTRA
}

# disk_status NAME AWK: runs an awk program over the status of the guest's first disk.
disk_status() {
    ringfence status --json | awk -v vbd="\"vbd$(domain_id $1).51712\"" '
        $1 == "\"name\":" { ours = index($2, vbd) } !ours { next } '"$2"
}

# disk_status_value NAME KEY: prints a value of that status.
disk_status_value() {
    disk_status $1 '$1 == "\"'$2'\":" { gsub(/[",]/, "", $2); print $2; exit }'
}

# disk_queue_count NAME: prints the number of the disk's queues.
disk_queue_count() {
    disk_status $1 '/"counters": \{/ { count++ } END { print count + 0 }'
}
# disk_queues_used NAME: prints the number of queues that had a request.
disk_queues_used() {
    disk_status $1 '/"counters": \{/ { used = 0 }
        /"(reads|writes)":/ && $2 + 0 > 0 && !used { used = 1; count++ } END { print count + 0 }'
}

# check_filesystem NAME [DEVICE]: checks that the guest can make an ext4 file system (on xvda by default), fill it,
# and read it back without its page cache. The sums of the files are in /tmp/sums.
check_filesystem() {
    local name=$1 dev=/dev/${2:-xvda}
    check "$name: mkfs.ext4 of $dev" on $name "mkfs.ext4 -q $dev && mkdir -p /mnt/disk && mount -t ext4 $dev /mnt/disk"
    check "$name: files on $dev" on $name 'for n in 1 2 3 4; do head -c $((n * 700000)) /dev/urandom >/mnt/disk/$n; done &&
        sha256sum /mnt/disk/[1-4] >/tmp/sums && sync && echo 3 >/proc/sys/vm/drop_caches && sha256sum -c -s /tmp/sums'
    check "$name: fsck of $dev" on $name "umount /mnt/disk && fsck.ext4 -f -n $dev"
}

# verify_files NAME: compares the files of `check_filesystem` with their sums.
verify_files() {
    on $1 'mount -t ext4 /dev/xvda /mnt/disk && sha256sum -c -s /tmp/sums; status=$?; umount /mnt/disk; exit $status'
}

# on_attached_disk NAME COMMAND: runs a command in the guest with DISK, the device of an NBD client of `ringfence attach`.
on_attached_disk() {
    local name=$1 status=0
    shift
    ON_LIMIT=150 on $name "ringfence run --quiet --uplink none --switch none --disk 'nbd+unix:///?socket=/tmp/disk.sock' -- \
        sh -c 'DISK=\$RINGFENCE_DISK0_DEVICE; $*' 2>/tmp/run.log || { tail -n 3 /tmp/run.log; false; }" >/tmp/attached || status=$?
    tr -d '\r' </tmp/attached
    return $status
}

# start_attach_disk NAME: starts `ringfence attach` for xvdb in the guest, and waits until it is connected.
start_attach_disk() {
    on $1 'ringfence attach --verbose --disk xvdb --socket /tmp/disk.sock >/tmp/attach.log 2>&1 & echo $! >/tmp/attach.pid;
        wait_for 20 grep -q connected /tmp/attach.log || { tail -n 5 /tmp/attach.log; false; }'
}

# check_attached_disk NAME FILE: checks that the guest's driver lets go of xvdb, whose bytes are in FILE, and that `ringfence
# attach` serves it then.
check_attached_disk() {
    local name=$1 file=$2
    on $name 'echo vbd-51728 >/sys/bus/xen/drivers/vbd/unbind; load_modules nbd'
    check 'no driver has the disk' on $name 'test ! -e /sys/class/block/xvdb'
    check 'ringfence attach connects to the backend' start_attach_disk $name
    is 'a client reads the bytes of the file' "$(on_attached_disk $name 'sha256sum <$DISK')" "$(sha256sum <$file)"
    check 'a client verifies what it writes, at random' on_attached_disk $name 'traffic load $DISK --seconds 4 --mebibytes 8'
    check 'fio verifies what it writes' on_attached_disk $name \
        'fio --name=verify --filename=$DISK --size=8m --loops=2 --direct=1 --thread --ioengine=psync --rw=randwrite' \
        '--bsrange=4k-256k --verify=crc32c --verify_fatal=1'
    is 'the file has what the guest reads' "$(on_attached_disk $name 'sha256sum <$DISK')" "$(sha256sum <$file)"
    on $name 'kill -9 $(cat /tmp/attach.pid)'
    check 'after a kill, the next one connects' start_attach_disk $name
    is 'a client reads the same' "$(on_attached_disk $name 'sha256sum <$DISK')" "$(sha256sum <$file)"
    if [ -n "${SERVE:-}" ]; then
        check 'another daemon takes over' restart_daemon
        is 'a client reads the same' "$(on_attached_disk $name 'sha256sum <$DISK')" "$(sha256sum <$file)"
    fi
    check 'it leaves in order' on $name 'kill $(cat /tmp/attach.pid) && wait_for 10 test ! -e /proc/$(cat /tmp/attach.pid)'
    # xen-blkback stays closed until a frontend initialises, and xen-blkfront does not when it is bound.
    [ -n "${SERVE:-}" ] || return 0
    check 'the guest'"'"'s driver has the disk again' on $name 'echo vbd-51728 >/sys/bus/xen/drivers/vbd/bind;
        wait_for 20 test -b /dev/xvdb'
    is 'it reads the same' "$(on $name 'sha256sum </dev/xvdb' | tr -d '\r')" "$(sha256sum <$file)"
}
