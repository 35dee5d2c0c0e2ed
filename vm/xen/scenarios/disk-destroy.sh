# title: guests destroyed with load on their disks: nothing stays mapped, what was flushed is there, others go on
# set: all
# machine: xen
# limit: 180

# start_writing NAME: starts to write files and flush each; /tmp/told has the sums of the flushed ones.
start_writing() {
    on $1 'mount -t ext4 /dev/xvda /mnt/disk; rm -f /tmp/told;
        { n=0; while [ $n -lt 400 ]; do n=$((n + 1)); head -c 60000 /dev/urandom >/mnt/disk/f.$n && sync &&
            sha256sum /mnt/disk/f.$n >>/tmp/told || break; done; } >/tmp/writing.log 2>&1 &'
    on $1 'wait_for 30 test -s /tmp/told'
}

# record_written NAME: stores the last of these sums in dom0.
record_written() {
    on $1 'tail -n 20 /tmp/told' | tr -d '\r' | grep f >/tmp/told.$1
    [ -s /tmp/told.$1 ]
}

# files_survived BEFORE NOW: succeeds if the disk that guest NOW has holds the files whose sums guest BEFORE reported.
files_survived() {
    local sum file
    while read -r sum file; do
        on $2 "echo '$sum  $file' >>/tmp/sums.before" || return 1
    done </tmp/told.$1
    on $2 'sha256sum -c -s /tmp/sums.before'
}

# recover_filesystem NAME: repairs the file system as after a loss of power, and succeeds if no fault is left then.
recover_filesystem() {
    on $1 'fsck.ext4 -p /dev/xvda; [ $? -le 1 ] && fsck.ext4 -f -n /dev/xvda && mkdir -p /mnt/disk &&
        mount -t ext4 /dev/xvda /mnt/disk'
}

no_device_is_finishing() {
    ! ringfence status --json | grep -E '"finishing": *[1-9]'
}

use_disks '[disks]' 'ring-page-order = 2' 'max-queues = 4'
create_image one 64
create_image beside 32
check 'another guest is created' create_guest beside "disk=[$(disk_line xvda beside)]" || give_up 'nobody is beside'
check 'it has its disk' has_disk beside xvda
start_load beside /dev/xvda --seconds 30 --mebibytes 24

create_four_queue_guest one one
check_filesystem one
check 'files are written and flushed' start_writing one
sleep 2
check 'some of them are known' record_written one
check 'under load the guest is destroyed, and nothing of it stays' destroy_guest one $(domain_id one)
check 'nor is its disk waited for' wait_for 20 no_device_is_finishing

# The others have the disk that it had, and one processor: four take their time.
create_guest_with_disk two one
check 'its file system is made good' recover_filesystem two
check 'what was flushed is there' files_survived one two
check 'and it can be written' on two 'echo more >/mnt/disk/more && umount /mnt/disk'
start_load two /dev/xvda --seconds 60 --threads 16 --largest 1024 --mebibytes 48
sleep 3
check 'with large requests under way it is destroyed, and nothing of it stays' destroy_guest two $(domain_id two)

create_guest_with_disk three one
start_load three /dev/xvda --seconds 60 --mebibytes 48
sleep 2
number=$(domain_id three)
kill -9 $SERVE
wait $SERVE
check 'with the daemon killed, the guest is destroyed' xl destroy three
check 'another daemon starts' start_daemon
check 'nothing of the guest stays' wait_for 20 nothing_left $number

check 'the guest beside had its disk all the while' finish_load beside
check_not 'and has nothing to complain of' on beside "dmesg | grep -E 'I/O error|BUG|WARNING|disabled for further use'"
create_guest_with_disk four one
check_filesystem four
check_destruction four
check_destruction beside
complete_scenario
