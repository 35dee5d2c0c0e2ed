# title: QEMU's disk backend, beside `serve`: the kernel's xen-blkfront, and our frontend in user space; every byte compared
# group: foreign
# set: all
# machine: xen
# limit: 300
# parts: qemu

. /vm/xen/foreign.sh

ON_LIMIT=100

# sum NAME FILE: the SHA-256 of the first 4 MiB.
sum() {
    on $1 "dd if=$2 bs=65536 count=64 2>/dev/null | sha256sum" | tr -d '\r' | cut -d ' ' -f 1
}

# said NAME LINE: our frontend in the guest has printed a line that begins so.
said() {
    on $1 "wait_for 60 sh -c 'grep \"^$2\" /tmp/disk.log || test -e /tmp/disk.status'; grep '^$2' /tmp/disk.log"
}

# used NAME DISK: 15 checks. A guest's disk, which both frontends use one after the other.
used() {
    local name=$1 image=$DISKS/$1 spec=$(echo "$2" | tr -d "'")
    check "$name has a disk" has_disk $name xvda || give_up "$(tail -n 3 /var/log/xen/*$name*.log)"
    filesystem $name
    check "$name: load of xen-blkfront" load_on $name /dev/xvda --seconds 3 --mebibytes 16
    note "$name, xen-blkfront: reads, writes, longest in ms: $(tail -n 1 /tmp/check.out)"
    on $name 'echo vbd-51712 >/sys/bus/xen/drivers/vbd/unbind; dd if=/dev/urandom of=/tmp/out bs=65536 count=64;
        echo 4096 >/sys/module/xen_gntalloc/parameters/limit'
    on $name "{ ringfence-bench internal disk-frontend --mebibytes 4 hold:/tmp/go.0 write:/tmp/out hold:/tmp/go.1 read:/tmp/back hold:/tmp/go.2 load:3 \
        >/tmp/disk.log 2>&1; echo \$? >/tmp/disk.status; } &"
    check "$name: our frontend connects" said $name connected ||
        give_up "$(on $name 'cat /tmp/disk.log'; xenstore-ls /local/domain/$(domain $name)/device/vbd)"
    on $name 'touch /tmp/go.0'
    check "$name: it writes 4 MiB" said $name 'wrote 4194304 bytes'
    is "$name: they are in the image" "$(sum dom0 $image)" "$(sum $name /tmp/out)"
    dd if=/dev/urandom of=$image bs=65536 count=64 conv=notrunc 2>/dev/null
    on $name 'touch /tmp/go.1'
    check "$name: it reads 4 MiB" said $name 'read 4194304 bytes'
    is "$name: they are those of the image" "$(sum $name /tmp/back)" "$(sum dom0 $image)"
    on $name 'touch /tmp/go.2'
    check "$name: requests at random are right" said $name loaded
    note "$name, our frontend: $(on $name 'grep loaded /tmp/disk.log')"
    check "$name: it closes in order" on $name 'wait_for 30 test -e /tmp/disk.status; grep closed /tmp/disk.log && test $(cat /tmp/disk.status) = 0'
    # The kernel remembers that blkfront left, and blkfront then uses only a backend that is still connected. This one was
    # closed in order, and waits for a frontend; so blkfront gets the disk as a new device.
    check "$name: xen-blkfront has the disk again" reattached $name "$spec"
    is "$name: it reads the image" "$(sum $name /dev/xvda)" "$(sum dom0 $image)"
    gone $name
}

# reattached NAME DISK: the toolstack removes the disk and adds it again.
reattached() {
    xl block-detach $1 xvda && wait_for 20 sh -c "! xenstore-read /local/domain/$(domain $1)/device/vbd/51712/state 2>/dev/null" &&
        xl block-attach $1 "$2" && on $1 'wait_for 20 test -b /dev/xvda'
}

use_disks
guests_with tools bench
MEMORY=256
image qdisk 48
image serve 48
QDISK="'vdev=xvda,format=raw,backendtype=qdisk,target=$DISKS/qdisk'"
check 'a guest with a disk of QEMU is created' guest qdisk "disk=[$QDISK]" || give_up "$(tail -n 3 /var/log/xen/*qdisk*.log)"
check 'QEMU serves it' pidof ${QEMU##*/}
used qdisk "$QDISK"
check 'a guest with a disk of serve is created' guest serve "disk=[$(disk xvda serve)]"
used serve "$(disk xvda serve)"
complete
