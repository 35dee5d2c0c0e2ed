# title: disks: read-only, of 4096-byte sectors, a block device; flush and discard; attached and detached
# set: all
# machine: xen
# limit: 150

# image_kilobytes IMAGE: prints the size of the image's blocks in KiB.
image_kilobytes() {
    du -k $DISKS/$1 | cut -f 1
}

# guest_output COMMAND: prints the output of a command in the guest, in one line.
guest_output() {
    on one "$@" | tr -d '\r\n'
}

discard_disk() {
    on one 'blkdiscard /dev/xvdb'
}

attach_disk() {
    xl block-attach one "$(disk_line xvde later | tr -d "'")" &&
        on one 'wait_for 20 test -b /dev/xvde'
}

detach_disk() {
    xl block-detach one xvde && on one 'wait_for 20 test ! -e /dev/xvde'
}

# image_is_locked: succeeds if a process has the file of the fourth disk locked.
image_is_locked() {
    grep "FLOCK .* WRITE .*:$(stat -c %i $DISKS/later) " /proc/locks
}

image_is_unlocked() {
    ! image_is_locked
}

use_disks '[[disk]]' 'vdev = "xvdb"' 'sector-size = 4096'
create_image ro 8
head -c 8388608 /dev/urandom >$DISKS/ro
create_image large 32
create_image behind 16
create_image later 16
was="$(sha256sum <$DISKS/ro)"
modprobe loop
check 'dom0 has a block device' losetup /dev/loop0 $DISKS/behind
check 'a guest with three disks is created' create_guest one \
    "disk=[$(disk_line xvda ro access=ro),$(disk_line xvdb large),'vdev=xvdc,format=raw,backendtype=phy,script=block-ringfence,target=/dev/loop0']" ||
    give_up "$(tail -n 3 /var/log/xen/*.log /share/serve-$SCENARIO.log)"
check 'it has the first' has_disk one xvda
check 'and the second' on one 'wait_for 20 test -b /dev/xvdb'
check 'and the third' on one 'wait_for 20 test -b /dev/xvdc'

is 'the first is read-only' "$(guest_output cat /sys/block/xvda/ro)" 1
is 'and says what is in it' "$(guest_output 'sha256sum </dev/xvda')" "$was"
check_not 'it cannot be written' on one 'echo damage | dd of=/dev/xvda bs=512 conv=sync,fsync'
is 'it is as it was' "$(sha256sum <$DISKS/ro)" "$was"
is 'status says read-only' "$(disk_status_value one read_only)" true

is 'the second has sectors of 4096 bytes' "$(guest_output cat /sys/block/xvdb/queue/logical_block_size)" 4096
is 'and 32 MiB' "$(guest_output cat /sys/block/xvdb/size)" 65536
check 'load on the second' run_load one /dev/xvdb --seconds 2 --mebibytes 24
check 'it was written to' test $(image_kilobytes large) -gt 1024
before=$(daemon_counter discards)
check 'it is given up' discard_disk
check 'that was a discard' test $(daemon_counter discards) -gt $before
check 'of which the file knows' test $(image_kilobytes large) -lt 1024
is 'what was given up reads as zeros' "$(guest_output 'sha256sum </dev/xvdb')" "$(head -c 33554432 /dev/zero | sha256sum)"
check_filesystem one xvdb

is 'the third is the block device' "$(read_key $BACKEND/$(vbd_path one 51744)/physical-device)" "$(stat -c %t:%T /dev/loop0)"
check 'load on the third' run_load one /dev/xvdc --seconds 2 --mebibytes 16
before=$(daemon_counter flushes)
check 'something is written and flushed' on one 'echo kept | dd of=/dev/xvdc bs=512 conv=sync,fsync'
check 'that was a flush' test $(daemon_counter flushes) -gt $before
is 'it is there' "$(head -c 4 $DISKS/behind)" kept

check 'a disk is attached' attach_disk
check 'nobody else gets it' image_is_locked
check 'load on the fourth' run_load one /dev/xvde --seconds 1
check 'it is detached' detach_disk
check 'and free' wait_for 10 image_is_unlocked
check_destruction one
losetup -d /dev/loop0
complete_scenario
