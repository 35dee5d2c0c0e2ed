# title: our driver in a guest, against `serve` with staged pages: every byte, ethtool, restarts, rebinding
# set: all
# machine: xen
# limit: 300
# driver: netfront

. /vm/xen/staging.sh
. /vm/xen/driver.sh

toggle_features() {
    on one 'for round in 1 2 3; do for what in tso gso tx rx gro sg; do
        ethtool -K eth0 $what off; usleep 100000; ethtool -K eth0 $what on; done; done'
}

# set_queues COUNT: changes the number of queues, and waits until all their pages are staged.
set_queues() {
    on one "ethtool -L eth0 combined $1" && has_queues one $1 && wait_for 40 has_staged one $((512 * $1))
}

# Mebibytes of a stream.
SIZE=${GUESTS_MEBIBYTES:-16}
ROUNDS=${ROUNDS:-10}
use_ringfence '[network]' 'mode = "staging"' 'max-queues = 2'
VCPUS=${GUESTS_VCPUS:-2}
guests_with tools driver
create_guest_with_our_driver one 11
check 'the pages of two queues are staged' wait_for 40 has_staged one 1024
check_packets_cost_no_operation 'two queues' one 11 0 $SIZE
start_datagram_return one
check 'datagrams of every length come back' traffic datagrams 10.77.0.11 7100 200
check 'packets are sent from staged pages' test "$(driver_counter one 'tx[01]_staged_slots')" -gt $((SIZE * 64))
check 'packets were sent and received whole' test "$(driver_counter one '[rt]x[01]_gso')" -gt $((SIZE * 6))
check_transfers_during 'killed and started' one 11 dom0 $((SIZE * 3 / 2)) restart_daemon
check 'the link stayed' vif_connected one
is 'the pages are still staged' "$(staged_page_count one)" 1024
check_transfers_during 'features switched off and on' one 11 dom0 $((SIZE * 3 / 2)) toggle_features
check 'the features are back' on one 'ethtool -k eth0 | grep "^tcp-segmentation-offload: on"'
check 'one queue' set_queues 1
check_transfer 'one queue: dom0 to one' dom0 one 10.77.0.11 $((SIZE / 2))
check 'two queues again' set_queues 2
check_transfer 'two queues: one to dom0' one dom0 $ADDRESS $((SIZE / 2))
check 'hashing over queue 1 alone' on one 'ethtool -X eth0 start 1 equal 1'
check_transfer 'hashed: dom0 to one' dom0 one 10.77.0.11 $((SIZE / 2))
check 'queue 1 had it' on one 'test $(ethtool -S eth0 | awk "/rx1_packets/ { print \$2 }") -gt '$((SIZE * 3))''
check 'a larger MTU is taken' on one 'ip link set eth0 mtu 9000 && ip link set eth0 mtu 1500'
check 'memory pressure frees staged pages' on one "echo 2 >/proc/sys/vm/drop_caches;
    wait_for 20 sh -c 'ethtool -S eth0 | grep -q \"shrunk_pages: [1-9]\"'"
check 'the backend has fewer pages' test "$(staged_page_count one)" -lt 1024
check_transfer 'with fewer pages: one to dom0' one dom0 $ADDRESS $((SIZE / 2))
check_driver_rebinding one 11 $ROUNDS dom0
check 'the pages are staged again' wait_for 40 has_staged one 1024
is 'no fault of the backend was counted' "$(driver_counter one backend_faults)" 0
# Before xen-netfront has been there: its waits read the store, of which a kernel with DEBUG_ATOMIC_SLEEP complains.
check_kernel_log one
on one 'load_modules xen-netfront'
check "the kernel's driver takes the interface" change_driver one 11 $DRIVER vif
check 'the kernel says so' uses_driver one vif
check 'our driver takes it back' change_driver one 11 vif $DRIVER
check_transfer 'one to dom0, after that' one dom0 $ADDRESS $((SIZE / 2))
check_destruction one
complete_scenario
