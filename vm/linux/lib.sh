# Helpers for scenarios on plain Linux.

# outside: a network of the host's, with somebody outside: veth `host0`, 10.78.0.1, and over there 10.78.0.2.
outside() {
    setsid unshare -n sleep 100000 &
    OUTSIDE=$!
    # busybox gives the other end no name.
    ip link add host0 type veth
    wait_for 10 elsewhere $OUTSIDE
    ip link set veth0 netns $OUTSIDE
    ip address add 10.78.0.1/24 dev host0
    ip link set host0 up
    over_there ip address add 10.78.0.2/24 dev veth0
    over_there ip link set veth0 up
    over_there ip link set lo up
    ip route add default via 10.78.0.2
}

# take_edu: gives QEMU's teaching device (docs/specs/edu.rst) to vfio-pci: $device, its folder, and $name.
take_edu() {
    device=$(grep -l 0x11e8 /sys/bus/pci/devices/*/device | head -n 1)
    device=${device%/device}
    name=${device##*/}
    check 'the device is there' test -n "$device" || return 1
    echo vfio-pci >$device/driver_override
    echo $name >/sys/bus/pci/drivers/vfio-pci/bind
}

# over_there COMMAND...: runs it outside.
over_there() {
    nsenter -t $OUTSIDE -n "$@"
}
