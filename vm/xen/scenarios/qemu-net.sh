# title: network backends of two versions of QEMU: our driver in a guest, every byte, rebinding, `ringfence attach`
# group: foreign
# set: all
# machine: xen
# limit: 400
# driver: netfront
# parts: qemu qemu-newest

. /vm/xen/driver.sh
. /vm/xen/foreign.sh

# served NAME N PROGRAM: 30 checks. These backends take one slot for a packet, and know neither segmentation nor staging.
served() {
    local name=$1 number=$2 program=$3
    note "$name: $($program --version | head -n 1)"
    check "$name is created without an interface" guest $name || give_up 'nothing to see'
    check "$name takes commands" guest_ready $name || give_up 'nothing to see'
    check "$name: QEMU is its backend" qemu_nic $program $name $number || give_up "$(tail -n 3 /share/qemu-$name.log)"
    check "$name has a network" again_with_address $name $number || give_up "$(qnic_ends $name)"
    check "$name uses our driver" driver_is $name $DRIVER
    is "$name: the directory of the backend" "$(key /local/domain/$(domain $name)/device/vif/0/backend)" "$(qnic $name)"
    check "$name: packets have one slot" on $name 'ethtool -k eth0 | grep "^tx-scatter-gather: off" && ethtool -k eth0 | grep "^tcp-segmentation-offload: off"'
    is "$name: nothing is staged" "$(counter $name staged_pages)" 0
    pings $name
    streams $name $number 8
    rebound $name $number 3
    is "$name: no fault of the backend was counted" "$(counter $name backend_faults)" 0
    healthy $name
    attach_takes_over $name $number $DRIVER
    gone_with_qemu $name
}

plan 61
check 'dom0 has a bridge' bridge
guests_with tools driver
served newer 21 $QEMU_NEWEST
served older 22 $QEMU
