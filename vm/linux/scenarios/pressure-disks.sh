# title: a disk keeps fewer pages mapped under memory pressure, without swap, and serves its guest meanwhile
# set: all
# machine: linux
# limit: 180

load_modules nbd crc32c_generic
mount -t cgroup2 cgroup2 /sys/fs/cgroup
check 'there are control groups with memory' grep -q memory /sys/fs/cgroup/cgroup.controllers || give_up 'no memory to limit'
check 'there is pressure stall information' test -r /proc/pressure/memory || give_up 'no report of pressure'
check 'there is no swap' sh -c 'test "$(wc -l </proc/swaps)" = 1'
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
group=/sys/fs/cgroup/pressed
mkdir $group /tmp/hog
mount -t tmpfs tmpfs /tmp/hog
truncate -s 64M /tmp/disk.img

# In the guest: reads of the whole device that no cache answers.
cat >/tmp/read.sh <<'END_OF_GUEST'
while test ! -e /tmp/stop; do
    dd if="$RINGFENCE_DISK0_DEVICE" of=/dev/null bs=1M iflag=direct 2>/dev/null || exit 1
    echo >>/tmp/rounds
done
END_OF_GUEST
# Launcher, driver domain, frontend and guest are in the group.
sh -c 'echo $$ >'$group'/cgroup.procs; exec ringfence run --name disk --disk /tmp/disk.img -- sh /tmp/read.sh' >/tmp/run.log 2>&1 &
launcher=$!

# Returns the sum of a level over the rings of the disk.
level() {
    ringfence status disk --json 2>/dev/null | grep -o "\"$1\":[ ]*[0-9]*" | head -n 1 | grep -o '[0-9]*$'
}
# Succeeds if the limit of mapped pages fulfils a condition: OPERATOR of test(1), NUMBER.
limit_is() {
    most=$(level pages_mapped_most)
    test -n "$most" && test "$most" "$1" "$2"
}
# Prints the number of sectors that the machine has read of NBD devices.
sectors_read() { cat /sys/block/nbd*/stat | awk '{ sum += $3 } END { print sum }'; }
has_read() { test "$(sectors_read)" -ge $1; }

check 'the disk has its full limit' wait_for 20 limit_is -gt 0
full=$most
note "pages that the disk may keep mapped: $full"
check 'the guest reads' wait_for 20 test -s /tmp/rounds

# Memory that cannot be reclaimed without swap: who adds to it waits.
echo $(($(cat $group/memory.current) + 8 * 1024 * 1024)) >$group/memory.high
sh -c 'echo $$ >'$group'/cgroup.procs; exec dd if=/dev/zero of=/tmp/hog/file bs=1M count=64' >/dev/null 2>&1 &
hog=$!
check 'the limit falls' wait_for 20 limit_is -lt $full
note "under pressure: $most; $(head -n 1 $group/memory.pressure)"
# Another MiB: processes of the guest have to wait for memory, so it may end no round meanwhile.
check 'reads go on under pressure' wait_for 30 has_read $(($(sectors_read) + 2048))
kill $hog
echo max >$group/memory.high
rm -f /tmp/hog/file
check 'the limit rises again' wait_for 60 limit_is -eq $full
touch /tmp/stop
wait $launcher
check 'the guest has read without an error' test $? = 0
check_not 'nothing was killed for want of memory' sh -c 'dmesg | grep -i "out of memory\|oom-kill"'
complete_scenario
