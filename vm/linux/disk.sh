# Disks of a machine on backends of its host. DISK is the name of the disk in use.

# block_of ADDRESS: prints the name of the disk at a PCI address.
block_of() { ls "$(echo /sys/bus/pci/devices/$1/virtio*/block)"; }

# use_disk ADDRESS: checks that a PCI function is a disk of 64 MiB, and sets DISK.
use_disk() {
    check "the disk at $1 is there" wait_for 10 block_of $1 || give_up 'no disk'
    DISK=$(block_of $1)
    is "$DISK has its size" "$(cat /sys/block/$DISK/size)" 131072
}

# disk_feature BIT: prints 1 if driver and device use the feature.
disk_feature() { cut -c $(($1 + 1)) /sys/block/$DISK/device/features; }

# stored_sum: prints the hash of the first 16 MiB of the disk, which the kernel reads anew.
stored_sum() {
    echo 3 >/proc/sys/vm/drop_caches
    dd if=/dev/$DISK bs=1M count=16 2>/dev/null | sha256sum | cut -d ' ' -f 1
}

# store_noise: writes 16 MiB of noise, and leaves its hash in /tmp/sum.
store_noise() {
    dd if=/dev/urandom bs=1M count=16 2>/dev/null >/tmp/noise
    sha256sum </tmp/noise | cut -d ' ' -f 1 >/tmp/sum
    dd if=/tmp/noise of=/dev/$DISK bs=64k conv=fsync 2>/dev/null
}

# stores_data: writes to the disk, and compares.
stores_data() { store_noise && test "$(stored_sum)" = "$(cat /tmp/sum)"; }

# completed_requests: prints the number of reads and writes that the disk has completed.
completed_requests() { awk '{ print $1 + $5 }' /sys/block/$DISK/stat; }

# has_completed NUMBER: succeeds if the disk has completed as many requests.
has_completed() { test "$(completed_requests)" -ge $1; }

# kill_under_load NAME FILE: has the host kill a process while the disk is under load, which writes to a file on it and
# compares every sector. Succeeds if the load does, and counts in KILLED if the load went on after the kill. QEMU before 8.2
# never connects again if a backend ends before it serves, so requests must have been completed before.
kill_under_load() {
    local load before
    before=$(completed_requests)
    traffic load $2 --mebibytes 8 --seconds 2 --threads 4 &
    load=$!
    wait_for 30 has_completed $((before + 50)) && on_host kill $1 || return
    before=$(completed_requests)
    wait $load || return
    ! has_completed $((before + 1)) || KILLED=$((KILLED + 1))
}

# check_kills LABEL NAME FILE: checks that a disk under load survives ten kills of a process.
check_kills() {
    local tries=0
    KILLED=0
    while [ $KILLED -lt 10 ] && [ $tries -lt 20 ] && kill_under_load $2 $3 >/tmp/kill.out 2>&1; do
        tries=$((tries + 1))
    done
    cat /tmp/kill.out
    is "$1 was killed under load" "$KILLED times" '10 times'
}

# check_hotplug OPTION...: checks that a disk with these options can be plugged in and out, and returns with its data.
check_hotplug() {
    local slot=0000:01:00.0
    check_not 'the slot is empty' block_of $slot
    check 'the disk is plugged in' on_host plug plugged "$@" || give_up "$(cat /share/order.out)"
    use_disk $slot
    check 'it stores data' stores_data
    check 'it is plugged out' on_host unplug plugged
    check 'it is no longer there' wait_for 10 no_block_of $slot
    check 'it is plugged in again' on_host plug plugged "$@"
    use_disk $slot
    is 'it has its data' "$(stored_sum)" "$(cat /tmp/sum)"
    check 'it stores data again' stores_data
    check_not 'the kernel has no complaint' sh -c 'dmesg | grep "WARNING:\|BUG:\|Oops\|I/O error"'
}
no_block_of() { ! block_of $1; }
