# title: our driver in a guest: the multicast filter, and header-only staging with and without hashing
# set: all
# machine: xen
# limit: 240
# driver: netfront

. /vm/xen/staging.sh
. /vm/xen/driver.sh

# filter_request_is VALUE: succeeds if the frontend requests the multicast filter (1) or does not (0).
filter_request_is() {
    key_is /local/domain/$(domain_id one)/device/vif/0/request-multicast-control $1
}

# groups_are COUNT: succeeds if the backend has that many groups.
groups_are() {
    [ "$(driver_counter one multicast_groups)" = $1 ]
}

# send_to_other_groups: sends frames to a group that the guest has not joined.
send_to_other_groups() {
    ping -c 5 -i 0.2 -W 1 -I xenbr0 239.1.2.3
}

# filtered_frames: prints the number of frames that the backend filtered.
filtered_frames() {
    vif_status_sum one '"(drop_)?multicast_filter"'
}

ping_small() {
    on one "ping -c 100 -i 0.02 -s 64 $ADDRESS"
}

use_ringfence '[network]' 'mode = "staging"' 'max-queues = 2'
VCPUS=2
guests_with tools driver
create_guest_with_our_driver one 11
ip route add 239.0.0.0/8 dev xenbr0
check 'the frontend asks for the filter' wait_for 20 filter_request_is 1
known=$(driver_counter one multicast_groups)
check "the backend has its groups ($known)" test $known -ge 2
before=$(filtered_frames)
send_to_other_groups
check 'frames to other groups are not passed' test $(($(filtered_frames) - before)) -ge 5
on one 'ip -6 address add fd77::abcd/64 dev eth0'
check 'an address more is a group more' wait_for 20 groups_are $((known + 1))
on one 'ip -6 address del fd77::abcd/64 dev eth0'
check 'and less again' wait_for 20 groups_are $known
ip -6 neigh flush dev xenbr0
check 'dom0 finds the guest by its group' ping -c 2 -W 5 fd77::11
on one 'ip link set eth0 promisc on'
check 'promiscuous, it asks for none' wait_for 20 filter_request_is 0
sleep 2
before=$(filtered_frames)
send_to_other_groups
is 'then every group is passed' "$(filtered_frames)" "$before"
on one 'ip link set eth0 promisc off'
check 'it asks again' wait_for 20 filter_request_is 1
is 'no change was refused' "$(driver_counter one multicast_refused)" 0

on one 'echo 1 >/sys/module/ringfence_netfront/parameters/staging_header'
check 'our driver connects anew' change_driver one 11 $DRIVER $DRIVER
check 'RX pages and pages of headers are staged' wait_for 40 has_staged one $((2 * (256 + 16)))
check 'the filter is on again' wait_for 20 filter_request_is 1
before=$(daemon_operations)
check 'short packets' ping_small
is 'they cost no grant operation' $(($(daemon_operations) - before)) 0
before=$(daemon_operations)
check_transfer 'dom0 to one' dom0 one 10.77.0.11 16
is 'receiving costs no grant operation' $(($(daemon_operations) - before)) 0
plain=$(driver_counter_difference one 'tx[01]_packets' 'tx[01]_staged_slots') packets=$(driver_counter one 'tx[01]_packets') before=$(daemon_operations)
check_transfer 'one to dom0' one dom0 $ADDRESS 16
check_transfer 'one to dom0, IPv6' one dom0 $ADDRESS6 16
note "$(($(driver_counter one 'tx[01]_packets') - packets)) packets, $(($(daemon_operations) - before)) grant operations"
is 'each packet has its header in a staged page' $(($(driver_counter_difference one 'tx[01]_packets' 'tx[01]_staged_slots') - plain)) 0
check 'the rest of long ones is copied' test $(daemon_operations) -gt $before
start_datagram_return one
check 'datagrams of every length come back' traffic datagrams 10.77.0.11 7100 200
check 'hashing over both queues' on one 'ethtool -X eth0 equal 2'
before=$(daemon_operations) slots=$(driver_counter one 'rx[01]_slots') packets=$(driver_counter one 'rx[01]_packets')
check_transfer 'hashed: dom0 to one' dom0 one 10.77.0.11 8
ping_small
is 'hashed packets cost no grant operation either' $(($(daemon_operations) - before)) 0
packets=$(($(driver_counter one 'rx[01]_packets') - packets))
check 'each carries its hash in a slot more' test $(($(driver_counter one 'rx[01]_slots') - slots)) -ge $((2 * packets))
is 'no fault of the backend was counted' "$(driver_counter one backend_faults)" 0
check_kernel_log one
check_destruction one
complete_scenario
