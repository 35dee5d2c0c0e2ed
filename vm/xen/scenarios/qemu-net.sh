# title: QEMU's network backend: our driver in a guest, every byte, rebinding, `ringfence attach`; the one of an older QEMU
# group: foreign
# set: all
# machine: xen
# limit: 400
# driver: netfront
# parts: qemu qemu-newest

. /vm/xen/driver.sh
. /vm/xen/foreign.sh

# begins NAME N PROGRAM: 4 checks. A guest with our driver, whose interface QEMU serves.
begins() {
    note "$1: $($3 --version | head -n 1)"
    check "$1 is created without an interface" guest $1 || give_up 'nothing to see'
    check "$1 takes commands" guest_ready $1 || give_up 'nothing to see'
    on $1 'echo 0 >/sys/bus/xen/drivers_autoprobe'
    check "$1: QEMU is its backend" qemu_nic $3 $1 $2 || give_up "$(tail -n 3 /share/qemu-$1.log)"
    check "$1: both ends are connected" qnic_bound $1 $DRIVER || give_up "$(qnic_ends $1)"
}

# served: 26 checks. This backend takes one slot for a packet, and knows neither segmentation nor staging.
served() {
    check 'it has a network' again_with_address new 21 || give_up "$(qnic_ends new)"
    check 'it uses our driver' driver_is new $DRIVER
    check 'packets have one slot' on new 'ethtool -k eth0 | grep "^scatter-gather: off" && ethtool -k eth0 | grep "^tcp-segmentation-offload: off"'
    is 'nothing is staged' "$(counter new staged_pages)" 0
    pings new
    streams new 21 8
    rebound new 21 3
    is 'no fault of the backend was counted' "$(counter new backend_faults)" 0
    healthy new
    attach_takes_over new 21 $DRIVER
    gone_with_qemu new
}

# connects: 6 checks. This backend answers requests, and gives the frames to no network: QEMU before 8.2 makes its interface without a
# peer.
connects() {
    on old "wait_for 20 test -e /sys/class/net/eth0; ip link set eth0 up; ip address add 10.77.0.22/24 dev eth0;
        arp -s $ADDRESS 00:16:3e:77:00:01"
    on old "ping -q -c 400 -i 0.02 -W 1 $ADDRESS"
    check 'more packets are answered than the ring has slots' on old 'test $(cat /sys/class/net/eth0/statistics/tx_packets) -ge 400'
    is 'they reach no network' "$(cat /sys/class/net/qemu22/statistics/rx_packets)" 0
    binds old $DRIVER $DRIVER
    check 'our driver unbound and bound: both ends are connected' wait_for 20 qnic_connected old || note "$(qnic_ends old)"
    is 'no fault of the older backend was counted' "$(counter old backend_faults)" 0
    healthy old
    gone_with_qemu old
}

check 'dom0 has a bridge' bridge
guests_with tools driver
begins new 21 $QEMU_NEWEST
served
begins old 22 $QEMU
connects
complete
