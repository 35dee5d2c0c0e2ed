# What is checked with disks. Each function says how many checks it makes.

DISKS=/run/disks

# use_disks [LINE...]: 2 checks. Guests' disks are served by `ringfence serve`, with these lines in its
# configuration, and with none of the kernel's backends. Their files are in $DISKS.
use_disks() {
    check_not 'the kernel has no backend loaded' grep -E '^xen_(netback|blkback) ' /proc/modules
    mkdir -p $DISKS && mount -t tmpfs disks $DISKS
    guests_with tools
    configure "$@"
    configured=$(cat /tmp/serve.toml)
    case $configured in *'[disks]'*) ;; *) configured="$configured
[disks]" ;; esac
    echo "$configured" | sed "s#^\[disks\]#[disks]\npaths = [\"/dev\", \"$DISKS\"]#" >/tmp/serve.toml
    check 'ringfence serve is ready' serve || give_up 'without a backend there is nothing to see'
}

# image NAME MEBIBYTES: makes a file for a disk.
image() {
    rm -f $DISKS/$1 && truncate -s ${2}M $DISKS/$1
}

# disk VDEV IMAGE [MORE]: one disk of a guest's configuration, a file in $DISKS.
disk() {
    printf "'vdev=%s,format=raw%s,backendtype=phy,script=block-ringfence,target=%s/%s'" \
        $1 "${3:+,$3}" $DISKS $2
}

# with_disk NAME [LINE...]: 2 checks. A guest with xvda, the image NAME (or IMAGE), that uses it.
with_disk() {
    local name=$1
    shift
    check "guest $name is created" guest $name "disk=[$(disk xvda ${IMAGE:-$name})]" "$@" ||
        give_up "$(tail -n 3 /var/log/xen/*.log /share/serve-$SCENARIO.log)"
    check "$name has a disk" has_disk $name xvda || give_up "$(ringfence status)"
}

# has_disk NAME VDEV
has_disk() {
    guest_ready $1 && on $1 "load crc32c_generic ext4 && wait_for 20 test -b /dev/$2"
}

# vbd NAME [VDEV_NUMBER]: the path of a disk below `backend` and `device`; xvda unless told.
vbd() {
    echo vbd/$(domain $1)/${2:-51712}
}

# disk_connected NAME [VDEV_NUMBER]: both ends say so.
disk_connected() {
    key_is $BACKEND/$(vbd $1 ${2:-})/state 4 &&
        key_is /local/domain/$(domain $1)/device/vbd/${2:-51712}/state 4
}

# disk_counter NAME: its sum over all disks and rings, and over what is counted of grants.
disk_counter() {
    ringfence status --json | grep -o "\"$1\": *[0-9]*" | awk '{ sum += $NF } END { print sum + 0 }'
}

# load NAME ARGUMENT...: load on a disk in a guest, of which every sector is checked; notes what it did.
load_on() {
    local name=$1 told
    shift
    told=$(ON_LIMIT=120 on $name "traffic load $* 2>&1") || { echo "$told"; return 1; }
    echo "reads, writes, longest in ms: $told"
}

# load_begins NAME ARGUMENT...: the same, beside other things; load_ends NAME says what came of it.
load_begins() {
    local name=$1
    shift
    on $name "rm -f /tmp/load*; { traffic load $* >/tmp/load.log 2>&1; echo \$? >/tmp/load.status; } &"
}
load_ends() {
    ON_LIMIT=150 on $1 'wait_for 140 test -s /tmp/load.status; cat /tmp/load.log; exit $(cat /tmp/load.status)'
}

# no_maps LABEL NAME ARGUMENT...: 2 checks. Load on a disk that has seen load before: none of its requests
# costs a map, unmap or copy operation. The daemon's own counters say so. Tried up to three times: a queue may
# meet pages that it had not seen before, and pages that were long not used are let go of.
no_maps() {
    local label=$1 name=$2 before requests hits tries=0 status=0
    shift 2
    while [ $tries -lt 3 ] && [ $status = 0 ]; do
        tries=$((tries + 1))
        before="$(grant_operations)" requests=$(requests) hits=$(disk_counter persistent_hits)
        load_on $name "$@"
        status=$?
        note "$label: $(($(requests) - requests)) requests, $(($(disk_counter persistent_hits) - hits)) pages found mapped"
        [ "$(grant_operations)" != "$before" ] || break
    done
    is "$label" $status 0
    is "$label: its maps, unmaps and copies" "$(grant_operations)" "$before"
}

grant_operations() {
    echo "$(disk_counter grant_maps) $(disk_counter grant_unmaps) $(disk_counter grant_copies)"
}

requests() {
    echo $(($(disk_counter reads) + $(disk_counter writes)))
}

# saved_and_restored NAME: with its disk in use.
saved_and_restored() {
    xl save $1 $DISKS/$1.save && xl restore $DISKS/$1.save && rm $DISKS/$1.save && console $1
}

# wide_guest NAME [LINE...]: 2 checks. A guest with a disk of four queues, where that many are offered.
wide_guest() {
    MEMORY=320 VCPUS=4 EXTRA='xen_blkfront.max_ring_page_order=2'
    with_disk "$@"
    MEMORY=192
    unset VCPUS EXTRA
}

# of_disk NAME AWK: what awk prints of the status of a guest's first disk, line by line.
of_disk() {
    ringfence status --json | awk -v vbd="\"vbd$(domain $1).51712\"" '
        $1 == "\"name\":" { ours = index($2, vbd) } !ours { next } '"$2"
}

# disk_row NAME KEY: a value of the status.
disk_row() {
    of_disk $1 '$1 == "\"'$2'\":" { gsub(/[",]/, "", $2); print $2; exit }'
}

# disk_queues NAME: how many it has; queues_used NAME: how many of these had a request.
disk_queues() {
    of_disk $1 '/"counters": \{/ { count++ } END { print count + 0 }'
}
queues_used() {
    of_disk $1 '/"counters": \{/ { used = 0 }
        /"(reads|writes)":/ && $2 + 0 > 0 && !used { used = 1; count++ } END { print count + 0 }'
}

# filesystem NAME [DEVICE]: 3 checks. In the guest an ext4 file system is made on xvda, filled, and found in
# order with what was put there, after its pages were forgotten. Its sums are in /tmp/sums.
filesystem() {
    local name=$1 dev=/dev/${2:-xvda}
    check "$name: mkfs.ext4 of $dev" on $name "mkfs.ext4 -q $dev && mkdir -p /mnt/disk && mount -t ext4 $dev /mnt/disk"
    check "$name: files on $dev" on $name 'for n in 1 2 3 4; do head -c $((n * 700000)) /dev/urandom >/mnt/disk/$n; done &&
        sha256sum /mnt/disk/[1-4] >/tmp/sums && sync && echo 3 >/proc/sys/vm/drop_caches && sha256sum -c -s /tmp/sums'
    check "$name: fsck of $dev" on $name "umount /mnt/disk && fsck.ext4 -f -n $dev"
}

# sums NAME: the files of `filesystem` are as they were.
sums() {
    on $1 'mount -t ext4 /dev/xvda /mnt/disk && sha256sum -c -s /tmp/sums; status=$?; umount /mnt/disk; exit $status'
}
