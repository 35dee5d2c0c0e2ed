# title: our driver with the newest Debian kernel and four queues: 256 MiB each way, ethtool, a restart, rebinding
# set: all
# machine: xen
# limit: 400
# driver: netfront
# kernel: newest

. /vm/xen/staging.sh
. /vm/xen/driver.sh

toggle_features() {
    on one 'for round in 1 2 3; do for what in tso gso tx rx gro sg; do
        ethtool -K eth0 $what off; usleep 100000; ethtool -K eth0 $what on; done; done'
}

# each_queue_counted COUNTER: succeeds if each of the four queues has counted packets.
each_queue_counted() {
    local queue
    for queue in 0 1 2 3; do
        [ "$(driver_counter one "$1${queue}_packets")" -gt 0 ] || return 1
    done
}

use_ringfence '[network]' 'mode = "staging"' 'max-queues = 4'
guests_with tools driver newest
KERNEL=/boot/vmlinuz-newest MEMORY=320 VCPUS=4
create_guest_with_our_driver one 11
note "$(on one 'uname -r' | tr -d '\r')"
check 'its kernel is not that of dom0' test "$(on one 'uname -r' | tr -d '\r')" != "$(uname -r)"
check 'the pages of four queues are staged' wait_for 40 has_staged one 2048
# This kernel's packets are longer, and so fewer.
check_packets_cost_no_operation 'four queues' one 11 0 32
check_transfer '256 MiB: one to dom0' one dom0 $ADDRESS 256
check_transfer '256 MiB: dom0 to one, IPv6' dom0 one fd77::11 256
on one '{ traffic echo 7200 >/dev/null 2>&1; } &'
check 'many connections' traffic many 10.77.0.11 7200 48 64
check 'each queue sends' each_queue_counted tx
check 'each queue receives' each_queue_counted rx
start_datagram_return one
check 'datagrams of every length come back' traffic datagrams 10.77.0.11 7100 200
check_transfers_during 'killed and started' one 11 dom0 24 restart_daemon
check 'the link stayed' vif_connected one
check_transfers_during 'features switched off and on' one 11 dom0 24 toggle_features
check 'the features are back' on one 'ethtool -k eth0 | grep "^tcp-segmentation-offload: on"'
check 'hashing over queue 1 alone' on one 'ethtool -X eth0 start 1 equal 1'
check_transfer 'hashed: dom0 to one' dom0 one 10.77.0.11 8
check 'queue 1 had it' on one 'test $(ethtool -S eth0 | awk "/rx1_packets/ { print \$2 }") -gt 50'
check_driver_rebinding one 11 3 dom0
check 'the pages are staged again' wait_for 40 has_staged one 2048
is 'no fault of the backend was counted' "$(driver_counter one backend_faults)" 0
check_kernel_log one
check_destruction one
complete_scenario
