# title: disks in use: a snapshot under load, taken over by another daemon, and a size that the guest sees
# set: all
# machine: xen
# limit: 150

# sectors_of DEVICE: prints the size of a disk in the guest, in units of 512 bytes.
sectors_of() {
    on one "cat /sys/block/$1/size" | tr -d '\r\n'
}

use_disks
create_image base 32
create_image plain 16
check 'a guest with two disks is created' create_guest one \
    "disk=[$(disk_line xvda base),$(disk_line xvdb plain)]" ||
    give_up "$(tail -n 3 /var/log/xen/*.log /share/serve-$SCENARIO.log)"
check 'it has the first' has_disk one xvda
check 'and the second' on one 'wait_for 20 test -b /dev/xvdb'
check_filesystem one

start_load one /dev/xvdb --seconds 6 --mebibytes 12
check 'a snapshot of a disk under load' ringfence disk snapshot one xvdb $DISKS/new.qcow2
was="$(sha256sum <$DISKS/plain)"
check 'the load ends well' finish_load one
is 'the file below is as it was' "$(sha256sum <$DISKS/plain)" "$was"
is 'the toolstack sees the overlay' "$(read_key $BACKEND/$(vbd_path one 51728)/params)" "qcow2:$DISKS/new.qcow2"
check_not 'a second one of that name' ringfence disk snapshot one xvdb $DISKS/new.qcow2

check 'another daemon takes over' restart_daemon
check 'load on the overlay' run_load one /dev/xvdb --seconds 2 --mebibytes 12
is 'the file below is as it was' "$(sha256sum <$DISKS/plain)" "$was"

is 'the first disk has 32 MiB' "$(sectors_of xvda)" 65536
truncate -s 48M $DISKS/base
check 'an enlarged file is accepted' ringfence disk resize one xvda
check 'the guest sees it' on one 'wait_for 20 grep -qx 98304 /sys/block/xvda/size'
check 'a file is enlarged' ringfence disk resize one xvda 64M
check 'the guest sees that too' on one 'wait_for 20 grep -qx 131072 /sys/block/xvda/size'
check 'the new end is written' on one 'echo end | dd of=/dev/xvda bs=512 seek=131071 conv=sync,fsync'
is 'it is there' "$(tail -c 512 $DISKS/base | head -c 3)" end
check 'the files are as they were' verify_files one
check_destruction one
complete_scenario
