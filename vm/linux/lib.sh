# Helpers for scenarios on plain Linux.

# A machine that a scenario has rebooted starts it again, with the checks that were made before.
REBOOTED=
boot=$(cat /proc/sys/kernel/random/boot_id)
if mv /share/checks $CHECKS 2>/dev/null; then
    REBOOTED=yes
elif [ -e /share/boot ] && [ "$(cat /share/boot)" != "$boot" ]; then
    not_ok 'the machine is up' 'it has rebooted by itself'
    exit 1
fi
echo "$boot" >/share/boot

# reboot_machine: reboots. The scenario then starts again, and REBOOTED is set.
reboot_machine() {
    cp $CHECKS /share/checks
    sync
    reboot -f
    sleep 100000
}

# on_host ORDER...: has the host of the machine execute an order (host-orders.sh), and prints the output. Returns the status.
on_host() {
    rm -f /share/order.status
    echo "$*" >/share/order.new && mv /share/order.new /share/order
    wait_for 60 test -e /share/order.status || return
    cat /share/order.out
    return "$(cat /share/order.status)"
}

# hide_secret: fills memory of the machine with a secret, for `scan`.
hide_secret() {
    local secret file
    secret=$(head -c 64 /dev/urandom | sha256sum | cut -c 1-32)
    mkdir -p /secret
    mount -t tmpfs secret /secret
    # Pages in use, and pages that were freed.
    for file in kept freed; do
        yes "$secret" | dd of=/secret/$file bs=64k count=512 iflag=fullblock 2>/dev/null
    done
    rm /secret/freed
    printf %s "$secret" >/share/secret
}

# scan NAME COMMAND...: has the host look for the secret in the memory of process NAME while the command is repeated, and
# prints the result (canary.py).
scan() {
    local process=$1 load
    shift
    touch /tmp/scanning
    (while [ -e /tmp/scanning ]; do "$@" || exit; done) >/dev/null 2>&1 &
    load=$!
    on_host scan $process >/tmp/scanned
    rm /tmp/scanning
    if wait $load; then cat /tmp/scanned; else echo "\`$*\` failed"; fi
}

# check_unseen LABEL SCANNED: checks that a process sees no secret of the machine.
check_unseen() {
    note "$1: $2"
    is "$1: sees no secret of the machine" "$(echo "$2" | cut -d ' ' -f 1-2)" 'hits 0'
}

# check_seen LABEL SCANNED: checks that a process sees the secret. Then the search finds what is there.
check_seen() {
    note "$1: $2"
    check "$1: sees a secret of the machine" test "$(echo "$2" | cut -d ' ' -f 2)" -gt 100000
}

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

# features_are_negotiated BIT...: succeeds if the driver of `eth0` and its device use these features.
features_are_negotiated() {
    local bit
    for bit in "$@"; do
        test "$(cut -c $((bit + 1)) /sys/class/net/eth0/device/features)" = 1 || return
    done
}

# check_kernel: checks that the machine's kernel has printed no warning, fault or bug.
check_kernel() { check_not 'the kernel has no complaint' sh -c 'dmesg | grep "WARNING:\|BUG:\|Oops"'; }
