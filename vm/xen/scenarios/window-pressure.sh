# title: windows of a guest shrink while its kernel reports memory pressure, and grow again
# group: window-long
# set: name
# machine: xen-pvh
# limit: 300
# driver: window

. /vm/xen/window.sh
. /vm/xen/perf.sh

issued_at_most() { [ $(count_issued_pages) -le $1 ]; }
issued_at_least() { [ $(count_issued_pages) -ge $1 ]; }

# start_memory_pressure: starts a writer in a group of the guest that is over its bound of memory and has nothing to
# give back.
start_memory_pressure() {
    on one 'mkdir -p /sys/fs/cgroup /tmp/fill; mount -t cgroup2 none /sys/fs/cgroup; mount -t tmpfs none /tmp/fill;
        echo +memory >/sys/fs/cgroup/cgroup.subtree_control && mkdir /sys/fs/cgroup/full && echo 1M >/sys/fs/cgroup/full/memory.high &&
        { sh -c "echo 0 >/sys/fs/cgroup/full/cgroup.procs; exec dd if=/dev/zero of=/tmp/fill/file bs=4k count=8192" >/dev/null 2>&1 & echo $! >/tmp/fill.pid; }'
}

# write_pool_row NAME: writes a row of the number of issued pages. Sets pages to it.
write_pool_row() {
    pages=$(count_issued_pages)
    write_row redesigned memory-pressure $1 pool 1 pages=$pages
    note "$1: $pages pages issued; $(on one 'head -n 1 /proc/pressure/memory' | tr -d '\r')"
}

guests_with window
before=$(free_memory)
create_driver_domain '[network]\nmode = "window"\n'
create_guest_with_windows one 11
check 'its kernel reports memory pressure' on one 'grep some /proc/pressure/memory'
check_transfer 'guest to driver domain' one net $ADDRESS 2
check_transfer 'driver domain to guest' net one 10.77.0.11 2
write_pool_row before
full=$pages
check 'pages are issued' test $full -gt 256
# Pages in use leave when they come back: packets keep flowing.
on net '{ traffic echo 7000 >/dev/null 2>&1 & }; start_receiver 6000'
on one "{ traffic send $ADDRESS 6000 2000 >/dev/null 2>&1 & }; { traffic pulse $ADDRESS 7000 100 >/dev/null 2>&1 & }"
check 'the guest is short of memory' start_memory_pressure
check 'its windows shrink to less than half' wait_for 30 issued_at_most $((full / 2))
write_pool_row during
check 'packets flow' on one "ping -c 3 -W 5 $ADDRESS"
on one 'kill -9 $(cat /tmp/fill.pid); killall traffic; umount /tmp/fill'
check_transfer 'guest to driver domain, afterwards' one net $ADDRESS 2
check 'its windows grow again' wait_for 30 issued_at_least $((pages + (full - pages) / 2))
write_pool_row after
for each in one net; do xl destroy $each; done
check 'all domains are gone' wait_for 30 only_dom0_is_left
is 'the memory is free again' "$(free_memory)" "$before"
complete_scenario
