# Helpers for scenarios on plain Linux.

# create_outside: creates an outside network: veth `host0` with 10.78.0.1 here, and 10.78.0.2 at its other end. Sets
# OUTSIDE to a process in that network.
create_outside() {
    setsid unshare -n sleep 100000 &
    OUTSIDE=$!
    # busybox gives the other end no name.
    ip link add host0 type veth
    wait_for 10 has_own_network $OUTSIDE
    ip link set veth0 netns $OUTSIDE
    ip address add 10.78.0.1/24 dev host0
    ip link set host0 up
    outside ip address add 10.78.0.2/24 dev veth0
    outside ip link set veth0 up
    outside ip link set lo up
    ip route add default via 10.78.0.2
}

# bind_edu_to_vfio: gives QEMU's teaching device (docs/specs/edu.rst) to vfio-pci. Sets $device to its folder, and
# $name to its address.
bind_edu_to_vfio() {
    device=$(grep -l 0x11e8 /sys/bus/pci/devices/*/device | head -n 1)
    device=${device%/device}
    name=${device##*/}
    check 'the device is there' test -n "$device" || return 1
    echo vfio-pci >$device/driver_override
    echo $name >/sys/bus/pci/drivers/vfio-pci/bind
}

# outside COMMAND...: runs a command in the outside network.
outside() {
    nsenter -t $OUTSIDE -n "$@"
}
