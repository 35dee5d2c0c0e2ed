# title: our driver with grant windows in a PVH guest that is saved, restored, checkpointed; live migration is refused
# group: window
# set: name
# machine: xen-pvh
# limit: 300
# driver: netfront window

. /vm/xen/window.sh
. /vm/xen/driver.sh

# windows_are_issued: succeeds if all pages of both windows are issued, by the hypervisor. The guest has no ethtool,
# so that it fits dom0's memory.
windows_are_issued() {
    [ $(count_issued_pages) = 512 ] && windows_are_open 2
}

# migrate: migrates the guest to this computer. Prints what the user sees.
migrate() {
    xl migrate -s '' one 'xl migrate-receive' 2>&1
}

guests_with window
before=$(free_memory)
create_driver_domain '[network]\nmode = "window"\n'
guests_with driver
MEMORY=160
create_guest_of_driver_domain one 11
check 'all pages are issued' wait_for 20 windows_are_issued
check_transfer 'one to net' one net $ADDRESS 4

# Live migration needs log-dirty mode, which the hypervisor refuses while there are windows.
xl dmesg -c >/dev/null
check_not 'live migration is refused' migrate
note "the user sees: $(grep -iE 'dirty|busy' /tmp/check.out | head -n 2 | tr '\n' ' ')"
check 'the hypervisor says why' sh -c 'xl dmesg | grep "has grant windows"'
check 'the guest goes on' on one "wait_for 20 ping -c 1 -W 1 $ADDRESS"
check 'with its windows' wait_for 20 windows_are_issued
check_transfer 'net to one, after that' net one 10.77.0.11 4

# A checkpoint: the guest is suspended, and goes on as the same domain. The driver closes its windows for that.
revokes=$(granter_counter one revoked)
check 'a checkpoint of it is saved' xl save -c one /tmp/one.save
find_console one
check 'the driver makes new windows' wait_for 40 windows_are_issued
check 'the old ones were revoked' test $(granter_counter one revoked) -ge $((revokes + 512))
check 'the network is back' on one "wait_for 30 ping -c 1 -W 1 $ADDRESS"
check_transfer 'one to net, after the checkpoint' one net $ADDRESS 4
rm /tmp/one.save

check 'it is saved' xl save one /tmp/one.save
check 'no window is left' wait_for 20 no_windows
check 'it is restored' xl restore /tmp/one.save
rm /tmp/one.save
find_console one
check 'the hotplug script runs' run_hotplug_script vif one 0
check 'the network is back after restoring' on one "wait_for 30 ping -c 1 -W 1 $ADDRESS"
check 'all pages are issued after restoring' wait_for 20 windows_are_issued
check_transfer 'net to one, after restoring' net one 10.77.0.11 4
check_kernel_log one
for each in one net; do xl destroy $each; done
check 'the domains leave no zombie' wait_for 30 only_dom0_is_left
is 'the memory is free again' "$(free_memory)" "$before"
complete_scenario
