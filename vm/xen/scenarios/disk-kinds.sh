# title: disks: read-only, of 4096-byte sectors, a block device; flush and discard; attached and detached
# set: all
# machine: xen
# limit: 150

# kilobytes IMAGE: what it takes.
kilobytes() {
    du -k $DISKS/$1 | cut -f 1
}

# in_guest WORDS: of the guest.
in_guest() {
    on one "$@" | tr -d '\r\n'
}

taken_back() {
    on one 'blkdiscard /dev/xvdb'
}

attached() {
    xl block-attach one "$(disk xvde later | tr -d "'")" &&
        on one 'wait_for 20 test -b /dev/xvde'
}

detached() {
    xl block-detach one xvde && on one 'wait_for 20 test ! -e /dev/xvde'
}

# Whether the daemon has the file to itself.
is_taken() {
    grep "FLOCK .* WRITE .*:$(stat -c %i $DISKS/later) " /proc/locks
}

free_again() {
    ! is_taken
}

use_disks '[[disk]]' 'vdev = "xvdb"' 'sector-size = 4096'
image ro 8
head -c 8388608 /dev/urandom >$DISKS/ro
image large 32
image behind 16
image later 16
was="$(sha256sum <$DISKS/ro)"
modprobe loop
check 'dom0 has a block device' losetup /dev/loop0 $DISKS/behind
check 'a guest with three disks is created' guest one \
    "disk=[$(disk xvda ro access=ro),$(disk xvdb large),'vdev=xvdc,format=raw,backendtype=phy,script=block-ringfence,target=/dev/loop0']" ||
    give_up "$(tail -n 3 /var/log/xen/*.log /share/serve-$SCENARIO.log)"
check 'it has the first' has_disk one xvda
check 'and the second' on one 'wait_for 20 test -b /dev/xvdb'
check 'and the third' on one 'wait_for 20 test -b /dev/xvdc'

is 'the first is read-only' "$(in_guest cat /sys/block/xvda/ro)" 1
is 'and says what is in it' "$(in_guest 'sha256sum </dev/xvda')" "$was"
check_not 'it cannot be written' on one 'echo damage | dd of=/dev/xvda bs=512 conv=sync,fsync'
is 'it is as it was' "$(sha256sum <$DISKS/ro)" "$was"
is 'status says read-only' "$(disk_row one read_only)" true

is 'the second has sectors of 4096 bytes' "$(in_guest cat /sys/block/xvdb/queue/logical_block_size)" 4096
is 'and 32 MiB' "$(in_guest cat /sys/block/xvdb/size)" 65536
check 'load on the second' load_on one /dev/xvdb --seconds 2 --mebibytes 24
check 'it was written to' test $(kilobytes large) -gt 8192
before=$(disk_counter discards)
check 'it is given up' taken_back
check 'that was a discard' test $(disk_counter discards) -gt $before
check 'of which the file knows' test $(kilobytes large) -lt 1024
is 'what was given up reads as zeros' "$(in_guest 'sha256sum </dev/xvdb')" "$(head -c 33554432 /dev/zero | sha256sum)"
filesystem one xvdb

is 'the third is the block device' "$(key $BACKEND/$(vbd one 51744)/physical-device)" "$(stat -c %t:%T /dev/loop0)"
check 'load on the third' load_on one /dev/xvdc --seconds 2 --mebibytes 16
before=$(disk_counter flushes)
check 'something is written and flushed' on one 'echo kept | dd of=/dev/xvdc bs=512 conv=sync,fsync'
check 'that was a flush' test $(disk_counter flushes) -gt $before
is 'it is there' "$(head -c 4 $DISKS/behind)" kept

check 'a disk is attached' attached
check 'nobody else gets it' is_taken
check 'load on the fourth' load_on one /dev/xvde --seconds 1
check 'it is detached' detached
check 'and free' wait_for 10 free_again
gone one
losetup -d /dev/loop0
complete
