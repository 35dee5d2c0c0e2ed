# What is checked with disks. Each function says how many checks it makes.

DISKS=/run/disks

# use_disks [LINE...]: 2 checks. Guests' disks are served by `ringfence serve`, with these lines in its
# configuration, and with none of the kernel's backends. Their files are in $DISKS.
use_disks() {
    check_not 'the kernel has no backend loaded' grep -E '^xen_(netback|blkback) ' /proc/modules
    mkdir -p $DISKS && mount -t tmpfs disks $DISKS
    # Guests with disks have the programs that look after ext4.
    RAMDISK=/run/guest-tools.cpio
    [ -e $RAMDISK ] || cat /boot/guest.cpio /boot/tools.cpio >$RAMDISK
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

# with_disk NAME [LINE...]: 2 checks. A guest with xvda, the image NAME, that uses it.
with_disk() {
    local name=$1
    shift
    check "guest $name is created" guest $name "disk=[$(disk xvda $name)]" "$@" ||
        give_up "$(tail -n 3 /var/log/xen/*.log /share/serve-$SCENARIO.log)"
    check "$name has a disk" has_disk $name xvda || give_up "$(ringfence status)"
}

# has_disk NAME VDEV
has_disk() {
    guest_ready $1 && on $1 "wait_for 20 test -b /dev/$2"
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

# filesystem NAME: 3 checks. In the guest an ext4 file system is made on xvda, filled, and found in order
# with what was put there, after its pages were forgotten. Its sums are in /tmp/sums.
filesystem() {
    check "$1: mkfs.ext4" on $1 'mkfs.ext4 -q /dev/xvda && mkdir -p /mnt/disk && mount -t ext4 /dev/xvda /mnt/disk'
    check "$1: files" on $1 'for n in 1 2 3 4; do head -c $((n * 700000)) /dev/urandom >/mnt/disk/$n; done &&
        sha256sum /mnt/disk/[1-4] >/tmp/sums && sync && echo 3 >/proc/sys/vm/drop_caches && sha256sum -c -s /tmp/sums'
    check "$1: fsck" on $1 'umount /mnt/disk && fsck.ext4 -f -n /dev/xvda'
}

# sums NAME: the files of `filesystem` are as they were.
sums() {
    on $1 'mount -t ext4 /dev/xvda /mnt/disk && sha256sum -c -s /tmp/sums; status=$?; umount /mnt/disk; exit $status'
}

# disk_gone NAME: 1 check. The guest is destroyed, and the hypervisor has nothing of it.
disk_gone() {
    gone $1
}
