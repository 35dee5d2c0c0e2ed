# title: mode `window` of a disk of two queues, from a PVH guest to a PVH driver domain
# group: window
# set: name
# machine: xen-pvh
# limit: 300
# driver: window

. /vm/xen/window.sh

ON_LIMIT=100

# start_frontend STEP...: starts the disk's frontend in the guest, which takes these steps. Its log is /tmp/disk.log.
start_frontend() {
    on one "{ ringfence-bench internal disk-frontend --windows --queues 2 --mebibytes 4 $* >/tmp/disk.log 2>&1; echo \$? >/tmp/disk.status; } &"
}

# frontend_said LINE: waits until the frontend prints a line that begins so.
frontend_said() {
    on one "wait_for 60 sh -c 'grep \"^$1\" /tmp/disk.log || test -e /tmp/disk.status'; grep '^$1' /tmp/disk.log"
}

first_sum() {
    on $1 "dd if=$2 bs=65536 count=64 2>/dev/null | sha256sum" | tr -d '\r' | cut -d ' ' -f 1
}

driver_domain_requests() {
    echo $(($(driver_domain_counter reads) + $(driver_domain_counter writes)))
}

guests_with bench window
MEMORY=256
before=$(free_memory)
configuration='[disks]\nmode = "window"\nmax-queues = 2\npaths = ["/run/disks"]\n'
create_driver_domain "$configuration"
check 'a guest of the driver domain is created' create_guest one 'type="pvh"' \
    "disk=['vdev=xvda,format=raw,backendtype=phy,backend=net,script=block-ringfence,target=/run/disks/one']"
check 'it takes commands' guest_ready one || give_up 'nothing to see'
check 'the hotplug script of its disk runs' run_hotplug_script vbd one 51712
check 'it has the device of windows' load_window_module one
on one 'wait_for 20 test -e /sys/bus/xen/drivers/vbd/vbd-51712; echo vbd-51712 >/sys/bus/xen/drivers/vbd/unbind;
    echo 4096 >/sys/module/xen_gntalloc/parameters/limit; dd if=/dev/urandom of=/tmp/out bs=65536 count=64'
start_frontend hold:/tmp/go.1 write:/tmp/out hold:/tmp/go.2 read:/tmp/back load:3 hold:/tmp/go.3 load:20
check 'the frontend connects with two queues' frontend_said 'connected, 2 queues' ||
    note "$(on one 'tail -n 5 /tmp/disk.log') $(on net 'tail -n 5 /tmp/serve.log')"
check 'the hypervisor has a window for each ring' wait_for 10 windows_are_open 2
operations=$(driver_domain_operations) requests=$(driver_domain_requests)
on one 'touch /tmp/go.1'
check 'the guest writes 4 MiB' frontend_said 'wrote 4194304 bytes'
is 'they are in the image' "$(first_sum net /run/disks/one)" "$(first_sum one /tmp/out)"
on net 'dd if=/dev/urandom of=/run/disks/one bs=1M count=4 conv=notrunc'
image=$(first_sum net /run/disks/one)
on one 'touch /tmp/go.2'
check 'the guest reads 4 MiB' frontend_said 'read 4194304 bytes'
is 'they are those of the image' "$(first_sum one /tmp/back)" "$image"
check 'requests of both queues at random are right' frontend_said loaded
note "$(on one 'grep loaded /tmp/disk.log')"
requests=$(($(driver_domain_requests) - requests))
check "that was hundreds of requests ($requests)" test $requests -gt 500
is 'none of them cost a grant operation' $(($(driver_domain_operations) - operations)) 0
note "$requests requests; $(dump_windows | grep -E 'window|issue|revoke' | head -n 8 | tr '\n' ' ')"

# The daemon dies under load, and its windows with it. Its successor serves the requests that it left.
on one 'rm -f /tmp/disk.log.before; cp /tmp/disk.log /tmp/disk.log.before; touch /tmp/go.3'
check 'load goes on' frontend_said 'held until /tmp/go.3'
check 'the daemon is killed under load' kill_driver_daemon
check 'its windows are gone with it' wait_for 10 windows_are_open 0
check 'another daemon serves' start_driver_daemon "$configuration"
check 'the guest makes new windows for it' wait_for 40 windows_are_open 2 ||
    note "$(on one 'tail -n 5 /tmp/disk.log') $(on net 'tail -n 8 /tmp/serve.log')"
loaded_twice() {
    on one "wait_for 90 test -e /tmp/disk.status; grep -c '^loaded' /tmp/disk.log" | tr -d '\r' | grep -x 2
}
check 'every request of that load was right' loaded_twice ||
    note "$(on one 'tail -n 5 /tmp/disk.log') $(on net 'tail -n 8 /tmp/serve.log')"
check 'the frontend closes in order' on one 'grep closed /tmp/disk.log && test $(cat /tmp/disk.status) = 0'
is 'no window is left' "$(count_open_windows)" 0
xl destroy one
xl destroy net
check 'the domains leave no zombie' wait_for 30 only_dom0_is_left
is 'the memory is free again' "$(free_memory)" "$before"
complete_scenario
