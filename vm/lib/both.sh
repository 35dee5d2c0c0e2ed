# For every shell in every machine: dom0, guests, plain Linux.

PATH=/usr/bin:/usr/sbin:/bin:/sbin:/usr/lib/xen/bin
export PATH

# leave_rootfs ARGUMENT...: runs init again, with its own arguments, on a root that `pivot_root` can leave. The
# kernel's first root file system cannot be left, which sandboxes need.
leave_rootfs() {
    [ "${1:-}" != again ] || return 0
    mount --bind / /mnt && cd /mnt && mount --move . / && exec chroot . /init again
}

# prepare_machine: mounts the file systems of the kernel, and brings up the loopback.
prepare_machine() {
    mount -t proc proc /proc
    mount -t sysfs sysfs /sys
    mount -t devtmpfs dev /dev
    mkdir -p /dev/pts /run /tmp
    mount -t devpts devpts /dev/pts
    mount -t tmpfs run /run
    ip link set lo up
    # Nobody else has our addresses: no need to wait until that is certain.
    [ -d /proc/sys/net/ipv6 ] || return 0
    for each in all default; do
        echo 0 >/proc/sys/net/ipv6/conf/$each/accept_dad
    done
}

# load_modules MODULE...: loads kernel modules, if the kernel has any.
load_modules() {
    # A kernel that has all it needs built in has no modules.
    [ -d /lib/modules/$(uname -r) ] || return 0
    for module in "$@"; do
        modprobe "$module" || echo "modprobe $module failed"
    done
}

# uptime_now: prints the seconds since the machine started.
uptime_now() {
    read -r now idle </proc/uptime
    echo "$now"
}

# has_own_network PID: succeeds if the process is in another network namespace than this shell.
has_own_network() {
    [ "$(readlink /proc/$1/ns/net)" != "$(readlink /proc/self/ns/net)" ]
}

# wait_for SECONDS COMMAND...: repeats the command ten times a second until it succeeds. Fails after SECONDS times
# $PATIENCE.
wait_for() {
    local now idle end
    read -r now idle </proc/uptime
    end=$((${now%.*} + $1 * ${PATIENCE:-4}))
    shift
    until "$@" >/dev/null 2>&1; do
        read -r now idle </proc/uptime
        [ ${now%.*} -le $end ] || return 1
        usleep 100000
    done
}

# start_receiver PORT [OPTION]: starts a server that takes one stream.
start_receiver() {
    rm -f /tmp/received.$1
    { traffic receive $1 ${2:-} >/tmp/receiving.$1; mv /tmp/receiving.$1 /tmp/received.$1; } &
    wait_for 10 is_listening $1
}

# stream_has_begun PORT: succeeds once a stream to `start_receiver` has begun or ended.
stream_has_begun() {
    [ -e /tmp/received.$1 ] || grep -q "$(printf ':%04X [0-9A-F]*:[0-9A-F]* 01' $1)" /proc/net/tcp /proc/net/tcp6
}

# is_listening PORT: succeeds if a TCP socket listens on the port.
is_listening() {
    grep -q "$(printf ':%04X [0-9A-F]*:0000 0A' $1)" /proc/net/tcp /proc/net/tcp6
}

# received_stream PORT: prints the length and the SHA-256 of the stream that `start_receiver` took.
received_stream() {
    wait_for 20 test -e /tmp/received.$1 && cat /tmp/received.$1
}
