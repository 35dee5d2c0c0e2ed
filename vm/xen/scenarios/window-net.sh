# title: mode `window` of a network interface, from a PVH guest to a PVH driver domain
# set: name
# machine: xen-pvh
# limit: 300
# driver: window

. /vm/xen/window.sh
. /vm/xen/staging.sh

# The driver domain has a bridge of its own; it, not dom0, is who guests talk to.
driver() {
    on net "load tun bridge xen-gntdev; ip link add xenbr0 type bridge && ip link set xenbr0 up &&
        ip address add $ADDRESS/24 dev xenbr0 && ip -6 address add $ADDRESS6/64 dev xenbr0"
}

serving() {
    on net 'printf "[network]\nmode = \"window\"\n" >/tmp/serve.toml;
        ringfence serve --config /tmp/serve.toml >>/tmp/serve.log 2>&1 & echo $! >/tmp/serve.pid'
    on net 'wait_for 15 ringfence status'
}

hotplug() {
    XENBUS_PATH=/local/domain/$(domain net)/backend/vif/$(domain one)/0 /etc/xen/scripts/vif-ringfence online
}

# total NAME: a counter of the daemon in the driver domain, summed over what has it.
total() {
    on net "ringfence status --json" | grep -oE "\"$1\": *[0-9]+" | awk '{ sum += $NF } END { print sum + 0 }'
}

grant_operations() {
    echo $(($(total grant_maps) + $(total grant_unmaps) + $(total grant_copies)))
}

# windows_open: registered windows, by the hypervisor.
windows_open() {
    dump_windows | grep -c 'registered at gfn'
}

two_windows() {
    [ $(windows_open) = 2 ]
}

plan 23
MEMORY=192
guests_with window
check 'the driver domain is created' guest net 'type="pvh"' driver_domain=1
check 'it takes commands' guest_ready net || give_up 'nothing to see'
check 'it has the device of windows' window_module net
check 'it has a bridge' driver
check 'it serves in mode window' serving
SCRIPT=vif-ringfence
check 'a guest of the driver domain is created' guest one 'type="pvh"' "$(vif 11 backend=net)"
check 'it takes commands' guest_ready one || give_up 'nothing to see'
check 'its hotplug script runs' hotplug
check 'it has the device of windows' window_module one
on one 'wait_for 20 test -e /sys/bus/xen/drivers/vif/vif-0; echo vif-0 >/sys/bus/xen/drivers/vif/unbind; load tun'
on one "ringfence attach --device 0 --name eth0 --windows -v >/tmp/attach.log 2>&1 & echo \$! >/tmp/attach.pid"
check 'ringfence attach gives it its interface' again_with_address one 11 ||
    note "$(on one 'tail -n 5 /tmp/attach.log') $(on net 'tail -n 5 /tmp/serve.log')"
check 'the hypervisor has two windows, one for each ring' wait_for 10 two_windows
before=$(grant_operations)
check 'the daemon counts the grants of the rings' test $before -gt 0
transfer 'guest to driver domain' one net $ADDRESS 8
transfer 'driver domain to guest, IPv6' net one fd77::11 8
is 'no packet costs a grant operation' $(($(grant_operations) - before)) 0
note "$(dump_windows | grep -E 'window|issue|revoke' | head -n 8 | tr '\n' ' ')"

# A driver daemon that dies takes its windows with it. Its successor finds the guest's keys without them.
windows_gone() {
    [ $(windows_open) = 0 ]
}

died() {
    on net 'kill -9 $(cat /tmp/serve.pid); wait_for 10 sh -c "! kill -0 $(cat /tmp/serve.pid) 2>/dev/null"'
}

check 'the daemon is killed' died
check 'its windows are gone with it' wait_for 10 windows_gone
check 'another daemon serves' serving
check 'the guest makes new windows for it' wait_for 30 two_windows ||
    note "$(on one 'tail -n 5 /tmp/attach.log') $(on net 'tail -n 8 /tmp/serve.log')"
check 'the guest is reached again' wait_for 20 again_with_address one 11
before=$(grant_operations)
transfer 'guest to the new daemon' one net $ADDRESS 4
is 'nor does a packet cost a grant operation now' $(($(grant_operations) - before)) 0

xl destroy one
xl destroy net
check 'the domains leave no zombie' wait_for 30 sh -c '[ $(xl list | wc -l) = 2 ]'
