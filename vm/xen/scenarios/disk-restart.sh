# title: a disk of four queues of four ring pages, the daemon killed again and again: under load, and under a file system
# set: all
# machine: xen
# limit: 180

LOG=/share/serve-$SCENARIO.log

# watch_states: records each write of a state, of which there must be none while the daemon restarts.
watch_states() {
    for path in $BACKEND/$(vbd_path one)/state /local/domain/$(domain_id one)/device/vbd/51712/state; do
        xenstore-watch $path >>/tmp/states &
    done
    wait_for 5 state_changes_are 2
}

state_changes_are() {
    [ "$(wc -l </tmp/states)" -eq $1 ]
}

# restart_repeatedly N: restarts the daemon N times, a second apart.
restart_repeatedly() {
    local round=0
    while [ $round -lt $1 ]; do
        round=$((round + 1))
        restart_daemon || return 1
        wait_for 15 takeovers_are $((TAKEN + round)) || { ringfence status; return 1; }
        sleep 1
    done
    TAKEN=$((TAKEN + round))
}

# takeovers_are N: succeeds if daemons have taken over the disk N times.
takeovers_are() {
    [ "$(grep -c 'taken over' $LOG)" -eq $1 ]
}

# unanswered_requests: prints the number of requests that a daemon left to the next one, in all.
unanswered_requests() {
    sed 's/\x1b\[[0-9;]*m//g' $LOG | grep 'taken over' | grep -o 'unanswered=[0-9]*' |
        awk -F= '{ sum += $2 } END { print sum + 0 }'
}

# pause_daemon SECONDS: kills the daemon, and starts another after that time.
pause_daemon() {
    kill -9 $SERVE
    wait $SERVE
    sleep $1
    start_daemon
}

# start_copying: starts to write, flush and compare files while the daemon is killed.
start_copying() {
    on one 'mount -t ext4 /dev/xvda /mnt/disk && rm -f /tmp/copy.status && { bad=0;
        for n in 1 2 3 4 5 6 7 8; do cp /mnt/disk/4 /mnt/disk/copy.$n && sync || bad=1; done;
        echo 3 >/proc/sys/vm/drop_caches;
        for n in 1 2 3 4 5 6 7 8; do cmp /mnt/disk/4 /mnt/disk/copy.$n || bad=1; done;
        echo $bad >/tmp/copy.status; } >/tmp/copy.log 2>&1 &'
}

copies_are_right() {
    ON_LIMIT=100 on one 'wait_for 90 test -s /tmp/copy.status; cat /tmp/copy.log; umount /mnt/disk; exit $(cat /tmp/copy.status)'
}

TAKEN=0
use_disks '[disks]' 'ring-page-order = 2' 'max-queues = 4'
create_image one 64
create_four_queue_guest one one
is 'it has four queues' "$(disk_queue_count one)" 4
check_filesystem one
check 'states are watched' watch_states

start_load one /dev/xvda --seconds 12 --mebibytes 48 --threads 16 --largest 512
sleep 1
check 'killed and started three times, under load' restart_repeatedly 3
check 'every sector is as it was written' finish_load one
check 'its daemon is killed while nothing is under way' restart_repeatedly 1
is 'the disk has four queues still' "$(disk_queue_count one)" 4
is 'of four ring pages each' "$(disk_status_value one ring_pages)" 4

check_filesystem one
start_copying
check 'killed and started three times, under a file system' restart_repeatedly 3
check 'the copies are what was copied' copies_are_right
check 'so are the files' verify_files one

start_load one /dev/xvda --seconds 6 --mebibytes 48 --threads 16
sleep 1
check 'for four seconds nobody serves it' pause_daemon 4
check 'every sector is as it was written all the same' finish_load one
note "requests that one daemon left to the next: $(unanswered_requests)"
check 'requests that were fetched and not answered were done by the next' test $(unanswered_requests) -gt 0
check 'nobody wrote a state' state_changes_are 2
check 'both ends are connected' disk_connected one
check_load_costs_no_operation 'taken over, pages stay mapped' one /dev/xvda --seconds 2
check_not 'the guest has nothing to complain of' on one "dmesg | grep -E 'I/O error|BUG|WARNING|disabled for further use'"
check_not 'nothing is charged to it' on dom0 "ringfence status | grep 'rules broken'"
check_destruction one
complete_scenario
