# title: mode `window` of a network interface of two queues, from a PVH guest to a PVH driver domain
# group: window
# set: name
# machine: xen-pvh
# limit: 300
# driver: window

. /vm/xen/window.sh

guests_with window
before=$(free_memory)
configuration='[network]\nmode = "window"\nmax-queues = 2\n'
create_driver_domain "$configuration"
create_guest_with_windows one 11 2
check 'the hypervisor has four windows, one for each ring' wait_for 10 windows_are_open 4
operations=$(driver_domain_operations)
check 'the daemon counts the grants of the rings' test $operations -gt 0
check_transfer 'guest to driver domain' one net $ADDRESS 8
check_transfer 'driver domain to guest, IPv6' net one fd77::11 8
is 'no packet costs a grant operation' $(($(driver_domain_operations) - operations)) 0
note "$(dump_windows | grep -E 'window|issue|revoke' | head -n 8 | tr '\n' ' ')"

# A driver daemon that dies takes its windows with it. Its successor finds the guest's keys without them.
check 'the daemon is killed' kill_driver_daemon
check 'its windows are gone with it' wait_for 10 windows_are_open 0
check 'another daemon serves' start_driver_daemon "$configuration"
check 'the guest makes new windows for it' wait_for 30 windows_are_open 4 ||
    note "$(on one 'tail -n 5 /tmp/attach.log') $(on net 'tail -n 8 /tmp/serve.log')"
check 'the guest reaches it' on one "wait_for 20 ping -c 1 -W 1 $ADDRESS"
operations=$(driver_domain_operations)
check_transfer 'guest to the new daemon' one net $ADDRESS 4
is 'nor does a packet cost a grant operation now' $(($(driver_domain_operations) - operations)) 0

xl destroy one
xl destroy net
check 'the domains leave no zombie' wait_for 30 only_dom0_is_left
is 'the memory is free again' "$(free_memory)" "$before"
complete_scenario
