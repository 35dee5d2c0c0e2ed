# title: QEMU's disk backend, beside `serve`: the kernel's xen-blkfront, and our frontend in user space; every byte compared
# group: foreign
# set: all
# machine: xen
# limit: 300
# parts: qemu

. /vm/xen/foreign.sh

ON_LIMIT=100

# first_sum NAME FILE: prints the SHA-256 of the first 4 MiB.
first_sum() {
    on $1 "dd if=$2 bs=65536 count=64 2>/dev/null | sha256sum" | tr -d '\r' | cut -d ' ' -f 1
}

# frontend_said NAME LINE: waits until our frontend in the guest prints a line that begins so.
frontend_said() {
    on $1 "wait_for 60 sh -c 'grep \"^$2\" /tmp/disk.log || test -e /tmp/disk.status'; grep '^$2' /tmp/disk.log"
}

# check_both_frontends NAME DISK: checks that the kernel's frontend and ours can use a guest's disk one after the
# other.
check_both_frontends() {
    local name=$1 image=$DISKS/$1 spec=$(echo "$2" | tr -d "'")
    check "$name has a disk" has_disk $name xvda || give_up "$(tail -n 3 /var/log/xen/*$name*.log)"
    check_filesystem $name
    check "$name: load of xen-blkfront" run_load $name /dev/xvda --seconds 3 --mebibytes 16
    note "$name, xen-blkfront: reads, writes, longest in ms: $(tail -n 1 /tmp/check.out)"
    on $name 'echo vbd-51712 >/sys/bus/xen/drivers/vbd/unbind; dd if=/dev/urandom of=/tmp/out bs=65536 count=64;
        echo 4096 >/sys/module/xen_gntalloc/parameters/limit'
    on $name "{ ringfence-bench internal disk-frontend --mebibytes 4 hold:/tmp/go.0 write:/tmp/out hold:/tmp/go.1 read:/tmp/back hold:/tmp/go.2 load:3 \
        >/tmp/disk.log 2>&1; echo \$? >/tmp/disk.status; } &"
    check "$name: our frontend connects" frontend_said $name connected ||
        give_up "$(on $name 'cat /tmp/disk.log'; xenstore-ls /local/domain/$(domain_id $name)/device/vbd)"
    on $name 'touch /tmp/go.0'
    check "$name: it writes 4 MiB" frontend_said $name 'wrote 4194304 bytes'
    is "$name: they are in the image" "$(first_sum dom0 $image)" "$(first_sum $name /tmp/out)"
    dd if=/dev/urandom of=$image bs=65536 count=64 conv=notrunc 2>/dev/null
    on $name 'touch /tmp/go.1'
    check "$name: it reads 4 MiB" frontend_said $name 'read 4194304 bytes'
    is "$name: they are those of the image" "$(first_sum $name /tmp/back)" "$(first_sum dom0 $image)"
    on $name 'touch /tmp/go.2'
    check "$name: requests at random are right" frontend_said $name loaded
    note "$name, our frontend: $(on $name 'grep loaded /tmp/disk.log')"
    check "$name: it closes in order" on $name 'wait_for 30 test -e /tmp/disk.status; grep closed /tmp/disk.log && test $(cat /tmp/disk.status) = 0'
    # The kernel remembers that blkfront left, and blkfront then uses only a backend that is still connected. This one was
    # closed in order, and waits for a frontend; so blkfront gets the disk as a new device.
    check "$name: xen-blkfront has the disk again" reattach_disk $name "$spec"
    is "$name: it reads the image" "$(first_sum $name /dev/xvda)" "$(first_sum dom0 $image)"
    check_destruction $name
}

# reattach_disk NAME DISK: removes the disk by the toolstack, and adds it again.
reattach_disk() {
    xl block-detach $1 xvda && wait_for 20 sh -c "! xenstore-read /local/domain/$(domain_id $1)/device/vbd/51712/state 2>/dev/null" &&
        xl block-attach $1 "$2" && on $1 'wait_for 20 test -b /dev/xvda'
}

use_disks
guests_with tools bench
MEMORY=256
create_image qdisk 48
create_image serve 48
QDISK="'vdev=xvda,format=raw,backendtype=qdisk,target=$DISKS/qdisk'"
check 'a guest with a disk of QEMU is created' create_guest qdisk "disk=[$QDISK]" || give_up "$(tail -n 3 /var/log/xen/*qdisk*.log)"
check 'QEMU serves it' pidof ${QEMU##*/}
check_both_frontends qdisk "$QDISK"
check 'a guest with a disk of serve is created' create_guest serve "disk=[$(disk_line xvda serve)]"
check_both_frontends serve "$(disk_line xvda serve)"
complete_scenario
