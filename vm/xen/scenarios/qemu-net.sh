# title: QEMU's network backend: our driver in a guest, every byte, rebinding, `ringfence attach`; the one of an older QEMU
# group: foreign
# set: all
# machine: xen
# limit: 400
# driver: netfront
# parts: qemu qemu-newest

. /vm/xen/driver.sh
. /vm/xen/foreign.sh

# create_qemu_guest NAME N PROGRAM: checks that a guest with our driver starts, and that its interface is connected to
# this QEMU.
create_qemu_guest() {
    note "$1: $($3 --version | head -n 1)"
    check "$1 is created without an interface" create_guest $1 || give_up 'nothing to see'
    check "$1 takes commands" guest_ready $1 || give_up 'nothing to see'
    on $1 'echo 0 >/sys/bus/xen/drivers_autoprobe'
    check "$1: QEMU is its backend" start_qemu_nic $3 $1 $2 || give_up "$(tail -n 3 /share/qemu-$1.log)"
    check "$1: both ends are connected" bind_qnic $1 $DRIVER || give_up "$(qnic_state $1)"
}

# check_newest_qemu: checks our driver with a backend that takes one slot for a packet, and knows neither segmentation
# nor staging.
check_newest_qemu() {
    check 'it has a network' configure_network new 21 || give_up "$(qnic_state new)"
    check 'it uses our driver' uses_driver new $DRIVER
    check 'packets have one slot' on new 'ethtool -k eth0 | grep "^scatter-gather: off" && ethtool -k eth0 | grep "^tcp-segmentation-offload: off"'
    is 'nothing is staged' "$(driver_counter new staged_pages)" 0
    check_pings new
    check_streams new 21 8
    check_driver_rebinding new 21 3 dom0
    is 'no fault of the backend was counted' "$(driver_counter new backend_faults)" 0
    check_kernel_log new
    check_attach_takes_over new 21 $DRIVER
    check_destruction_with_qemu new
}

# check_older_qemu: checks our driver with a backend that answers requests but gives the frames to no network: QEMU
# before 8.2 creates its interface without a peer.
check_older_qemu() {
    on old "wait_for 20 test -e /sys/class/net/eth0; ip link set eth0 up; ip address add 10.77.0.22/24 dev eth0;
        arp -s $ADDRESS 00:16:3e:77:00:01"
    on old "ping -q -c 400 -i 0.02 -W 1 $ADDRESS"
    check 'more packets are answered than the ring has slots' on old 'test $(cat /sys/class/net/eth0/statistics/tx_packets) -ge 400'
    is 'they reach no network' "$(cat /sys/class/net/qemu22/statistics/rx_packets)" 0
    change_binding old $DRIVER $DRIVER
    check 'our driver unbound and bound: both ends are connected' wait_for 20 qnic_connected old || note "$(qnic_state old)"
    is 'no fault of the older backend was counted' "$(driver_counter old backend_faults)" 0
    check_kernel_log old
    check_destruction_with_qemu old
}

check 'dom0 has a bridge' create_bridge
guests_with tools driver
create_qemu_guest new 21 $QEMU_NEWEST
check_newest_qemu
create_qemu_guest old 22 $QEMU
check_older_qemu
complete_scenario
