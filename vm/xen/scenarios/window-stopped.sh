# title: a guest takes its windows back while the driver domain's daemon is stopped by a signal
# group: window
# set: name
# machine: xen-pvh
# limit: 300
# driver: window

. /vm/xen/window.sh

# program_has_ended NAME: waits until the guest's program does not exist any more.
program_has_ended() {
    on one "wait_for 20 test ! -e /proc/\$(cat /tmp/$1.pid)"
}

guests_with bench window
MEMORY=256
before=$(free_memory)
create_driver_domain '[network]\nmode = "window"\n[disks]\nmode = "window"\npaths = ["/run/disks"]\n'
SCRIPT=vif-ringfence
check 'a guest of the driver domain is created' create_guest one 'type="pvh"' "$(vif_line 11 backend=net)" \
    "disk=['vdev=xvda,format=raw,backendtype=phy,backend=net,script=block-ringfence,target=/run/disks/one']"
check 'it takes commands' guest_ready one || give_up 'nothing to see'
check 'the hotplug script of its interface runs' run_hotplug_script vif one 0
check 'that of its disk runs' run_hotplug_script vbd one 51712
check 'it has the device of windows' load_window_module one
on one 'wait_for 20 test -e /sys/bus/xen/drivers/vif/vif-0; echo vif-0 >/sys/bus/xen/drivers/vif/unbind;
    wait_for 20 test -e /sys/bus/xen/drivers/vbd/vbd-51712; echo vbd-51712 >/sys/bus/xen/drivers/vbd/unbind;
    load_modules tun; echo 4096 >/sys/module/xen_gntalloc/parameters/limit'
start_attach_with_windows one 1
check 'ringfence attach gives it its interface' configure_network one 11 ||
    note "$(on one 'tail -n 5 /tmp/attach.log') $(on net 'tail -n 5 /tmp/serve.log')"
on one '{ ringfence-bench internal disk-frontend --windows load:100 >/tmp/disk.log 2>&1 & echo $! >/tmp/disk.pid; }'
check 'its disk is under load' on one 'wait_for 30 grep ^connected /tmp/disk.log'
check 'the hypervisor has three windows' wait_for 20 windows_are_open 3
on net 'start_receiver 6000'
on one "{ traffic send $ADDRESS 6000 64 >/tmp/sending 2>&1 & }"
# Growth, not a rate: how fast an emulated computer is depends on what runs beside it.
received=$(on net 'cat /sys/class/net/xenbr0/statistics/rx_bytes' | tr -d '\r')
check 'packets flow' on net "wait_for 20 sh -c 'test \$(cat /sys/class/net/xenbr0/statistics/rx_bytes) -gt $((received + 300000))'"
check 'the daemon is stopped under load' stop_driver_daemon
full=$(guest_free_pages one) issued=$(count_issued_pages)

# The disk's requests hold pages in use: their status words are raised, and nobody is there to lower them.
check 'the disk frontend is killed' on one 'kill -9 $(cat /tmp/disk.pid)'
check 'it ends' program_has_ended disk
check 'its window is gone although the grantee does nothing' wait_for 10 windows_are_open 2
check 'ringfence attach is told to end' on one 'kill $(cat /tmp/attach.pid)'
check 'it ends' program_has_ended attach
check 'its windows are gone too' wait_for 10 windows_are_open 0
note "$(dump_windows | grep -E 'issue|revoke|flush' | head -n 4 | tr '\n' ' ')"
check 'the guest lives' on one 'head -c 1048576 /dev/urandom | sha256sum'
freed=$(($(guest_free_pages one) - full))
note "$issued pages were issued; $freed pages of the guest are free again"
check 'the guest has the pages of its windows again' test $freed -ge $issued
check_not 'the daemon is stopped all the time' on net 'grep -q "^State:.[RS]" /proc/$(cat /tmp/serve.pid)/status'

check 'the daemon goes on' on net 'kill -CONT $(cat /tmp/serve.pid); wait_for 20 ringfence status'
start_attach_with_windows one 1
check 'the guest has its interface again' wait_for 20 configure_network one 11 ||
    note "$(on one 'tail -n 5 /tmp/attach.log') $(on net 'tail -n 5 /tmp/serve.log')"
check_transfer 'guest to driver domain' one net $ADDRESS 4
xl destroy one
xl destroy net
check 'the domains leave no zombie' wait_for 30 only_dom0_is_left
is 'the memory is free again' "$(free_memory)" "$before"
complete_scenario
