# title: receive windows shrink under memory pressure and grow again, in the middle of a transfer
# set: all
# machine: linux
# limit: 180

# Memory other than receive windows can be swapped out. Otherwise half of the used memory is less than processes need.
load_modules brd
check 'there is swap' sh -c 'mkswap /dev/ram0 && swapon /dev/ram0'
mount -t cgroup2 cgroup2 /sys/fs/cgroup
check 'there are control groups with memory' grep -q memory /sys/fs/cgroup/cgroup.controllers || give_up 'no memory to limit'
check 'there is pressure stall information' test -r /proc/pressure/memory || give_up 'no report of pressure'
check 'receive windows shrink, the stream goes on, receive windows grow' ringfence-bench pressure --seconds 24 --json --html /share/pressure.html
cp /tmp/check.out /share/pressure.jsonl
note "$(tail -n 1 /tmp/check.out)"
check 'the page has plots' grep -q '<svg' /share/pressure.html
check_not 'nothing was killed for want of memory' sh -c 'dmesg | grep -i "out of memory\|oom-kill"'
complete_scenario
