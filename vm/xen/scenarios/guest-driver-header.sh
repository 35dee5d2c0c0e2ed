# title: our driver in a guest: the multicast filter, and header-only staging with and without hashing
# set: all
# machine: xen
# limit: 240
# driver: netfront

. /vm/xen/staging.sh
. /vm/xen/driver.sh

# asks VALUE: the frontend asks for the filter, or not.
asks() {
    key_is /local/domain/$(domain one)/device/vif/0/request-multicast-control $1
}

# groups COUNT: the backend has so many.
groups() {
    [ "$(counter one multicast_groups)" = $1 ]
}

# unwanted: frames to a group that the guest has not joined.
unwanted() {
    ping -c 5 -i 0.2 -W 1 -I xenbr0 239.1.2.3
}

# filtered: those that the backend did not pass.
filtered() {
    of_vif one '"(drop_)?multicast_filter"'
}

pings_small() {
    on one "ping -c 100 -i 0.02 -s 64 $ADDRESS"
}

use_ringfence '[network]' 'mode = "staging"' 'max-queues = 2'
VCPUS=2
guests_with tools driver
driven one 11
ip route add 239.0.0.0/8 dev xenbr0
check 'the frontend asks for the filter' wait_for 20 asks 1
known=$(counter one multicast_groups)
check "the backend has its groups ($known)" test $known -ge 2
before=$(filtered)
unwanted
check 'frames to other groups are not passed' test $(($(filtered) - before)) -ge 5
on one 'ip -6 address add fd77::abcd/64 dev eth0'
check 'an address more is a group more' wait_for 20 groups $((known + 1))
on one 'ip -6 address del fd77::abcd/64 dev eth0'
check 'and less again' wait_for 20 groups $known
ip -6 neigh flush dev xenbr0
check 'dom0 finds the guest by its group' ping -c 2 -W 5 fd77::11
on one 'ip link set eth0 promisc on'
check 'promiscuous, it asks for none' wait_for 20 asks 0
sleep 2
before=$(filtered)
unwanted
is 'then every group is passed' "$(filtered)" "$before"
on one 'ip link set eth0 promisc off'
check 'it asks again' wait_for 20 asks 1
is 'no change was refused' "$(counter one multicast_refused)" 0

on one 'echo 1 >/sys/module/ringfence_netfront/parameters/staging_header'
check 'our driver connects anew' bound_again one 11 $DRIVER $DRIVER
STAGED=$((2 * (256 + 16)))
check 'RX pages and pages of headers are staged' wait_for 40 all_staged one
check 'the filter is on again' wait_for 20 asks 1
before=$(operations)
check 'short packets' pings_small
is 'they cost no grant operation' $(($(operations) - before)) 0
before=$(operations)
transfer 'dom0 to one' dom0 one 10.77.0.11 16
is 'receiving costs no grant operation' $(($(operations) - before)) 0
plain=$(counter_less one 'tx[01]_packets' 'tx[01]_staged_slots') packets=$(counter one 'tx[01]_packets') before=$(operations)
transfer 'one to dom0' one dom0 $ADDRESS 16
transfer 'one to dom0, IPv6' one dom0 $ADDRESS6 16
note "$(($(counter one 'tx[01]_packets') - packets)) packets, $(($(operations) - before)) grant operations"
is 'each packet has its header in a staged page' $(($(counter_less one 'tx[01]_packets' 'tx[01]_staged_slots') - plain)) 0
check 'the rest of long ones is copied' test $(operations) -gt $before
returns one
check 'datagrams of every length come back' traffic datagrams 10.77.0.11 7100 200
check 'hashing over both queues' on one 'ethtool -X eth0 equal 2'
before=$(operations) slots=$(counter one 'rx[01]_slots') packets=$(counter one 'rx[01]_packets')
transfer 'hashed: dom0 to one' dom0 one 10.77.0.11 8
pings_small
is 'hashed packets cost no grant operation either' $(($(operations) - before)) 0
packets=$(($(counter one 'rx[01]_packets') - packets))
check 'each carries its hash in a slot more' test $(($(counter one 'rx[01]_slots') - slots)) -ge $((2 * packets))
is 'no fault of the backend was counted' "$(counter one backend_faults)" 0
healthy one
gone one
complete
