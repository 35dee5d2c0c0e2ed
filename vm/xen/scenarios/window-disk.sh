# title: mode `window` of a disk of two queues, from a PVH guest to a PVH driver domain
# group: window
# set: name
# machine: xen-pvh
# limit: 300
# driver: window

. /vm/xen/window.sh

ON_LIMIT=100

# frontend STEP...: the disk's frontend in the guest, which takes these steps; its lines are in /tmp/disk.log.
frontend() {
    on one "{ ringfence-bench internal disk-frontend --windows --queues 2 --mebibytes 4 $* >/tmp/disk.log 2>&1; echo \$? >/tmp/disk.status; } &"
}

# said LINE: the frontend has printed a line that begins so.
said() {
    on one "wait_for 60 sh -c 'grep \"^$1\" /tmp/disk.log || test -e /tmp/disk.status'; grep '^$1' /tmp/disk.log"
}

sum() {
    on $1 "dd if=$2 bs=65536 count=64 2>/dev/null | sha256sum" | tr -d '\r' | cut -d ' ' -f 1
}

requests() {
    echo $(($(total reads) + $(total writes)))
}

guests_with bench window
MEMORY=256
before=$(free_memory)
driver_domain '[disks]\nmode = "window"\nmax-queues = 2\npaths = ["/run/disks"]\n'
check 'a guest of the driver domain is created' guest one 'type="pvh"' \
    "disk=['vdev=xvda,format=raw,backendtype=phy,backend=net,script=block-ringfence,target=/run/disks/one']"
check 'it takes commands' guest_ready one || give_up 'nothing to see'
check 'the hotplug script of its disk runs' plugged vbd one 51712
check 'it has the device of windows' window_module one
on one 'wait_for 20 test -e /sys/bus/xen/drivers/vbd/vbd-51712; echo vbd-51712 >/sys/bus/xen/drivers/vbd/unbind;
    echo 4096 >/sys/module/xen_gntalloc/parameters/limit; dd if=/dev/urandom of=/tmp/out bs=65536 count=64'
frontend hold:/tmp/go.1 write:/tmp/out hold:/tmp/go.2 read:/tmp/back load:3 hold:/tmp/go.3 load:20
check 'the frontend connects with two queues' said 'connected, 2 queues' ||
    note "$(on one 'tail -n 5 /tmp/disk.log') $(on net 'tail -n 5 /tmp/serve.log')"
check 'the hypervisor has a window for each ring' wait_for 10 windows_are 2
operations=$(operations_of_driver) requests=$(requests)
on one 'touch /tmp/go.1'
check 'the guest writes 4 MiB' said 'wrote 4194304 bytes'
is 'they are in the image' "$(sum net /run/disks/one)" "$(sum one /tmp/out)"
on net 'dd if=/dev/urandom of=/run/disks/one bs=1M count=4 conv=notrunc'
image=$(sum net /run/disks/one)
on one 'touch /tmp/go.2'
check 'the guest reads 4 MiB' said 'read 4194304 bytes'
is 'they are those of the image' "$(sum one /tmp/back)" "$image"
check 'requests of both queues at random are right' said loaded
note "$(on one 'grep loaded /tmp/disk.log')"
requests=$(($(requests) - requests))
check "that was hundreds of requests ($requests)" test $requests -gt 500
is 'none of them cost a grant operation' $(($(operations_of_driver) - operations)) 0
note "$requests requests; $(dump_windows | grep -E 'window|issue|revoke' | head -n 8 | tr '\n' ' ')"

# The daemon dies under load, and its windows with it. Its successor serves the requests that it left.
on one 'rm -f /tmp/disk.log.before; cp /tmp/disk.log /tmp/disk.log.before; touch /tmp/go.3'
check 'load goes on' said 'held until /tmp/go.3'
check 'the daemon is killed under load' died
check 'its windows are gone with it' wait_for 10 windows_are 0
check 'another daemon serves' serving
check 'the guest makes new windows for it' wait_for 40 windows_are 2 ||
    note "$(on one 'tail -n 5 /tmp/disk.log') $(on net 'tail -n 8 /tmp/serve.log')"
loads_twice() {
    on one "wait_for 90 test -e /tmp/disk.status; grep -c '^loaded' /tmp/disk.log" | tr -d '\r' | grep -x 2
}
check 'every request of that load was right' loads_twice ||
    note "$(on one 'tail -n 5 /tmp/disk.log') $(on net 'tail -n 8 /tmp/serve.log')"
check 'the frontend closes in order' on one 'grep closed /tmp/disk.log && test $(cat /tmp/disk.status) = 0'
is 'no window is left' "$(windows_open)" 0
xl destroy one
xl destroy net
check 'the domains leave no zombie' wait_for 30 alone
is 'the memory is free again' "$(free_memory)" "$before"
complete
