# For every shell in every machine: dom0, guests, plain Linux.

PATH=/usr/bin:/usr/sbin:/bin:/sbin:/usr/lib/xen/bin
export PATH

# The first thing an init does, with its own arguments: runs itself again with a root that can be
# pivoted away from, which the kernel's first root file system cannot; sandboxes want that.
leave_rootfs() {
    [ "${1:-}" != again ] || return 0
    mount --bind / /mnt && cd /mnt && mount --move . / && exec chroot . /init again
}

# The second: what every machine has mounted.
set_up() {
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

# load MODULE...
load() {
    # A kernel that has all it needs built in has no modules.
    [ -d /lib/modules/$(uname -r) ] || return 0
    for module in "$@"; do
        modprobe "$module" || echo "modprobe $module failed"
    done
}

# Seconds since the machine started.
uptime_now() {
    read -r now idle </proc/uptime
    echo "$now"
}

# elsewhere PID: succeeds once the process has a network of its own.
elsewhere() {
    [ "$(readlink /proc/$1/ns/net)" != "$(readlink /proc/self/ns/net)" ]
}

# wait_for SECONDS COMMAND...: until the command succeeds; tried ten times a second.
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

# receive PORT: starts a server that takes one stream.
receive() {
    rm -f /tmp/received.$1
    { traffic receive $1 >/tmp/receiving.$1; mv /tmp/receiving.$1 /tmp/received.$1; } &
    wait_for 10 listens $1
}

# flows PORT: a stream of `receive` has begun, or ended already.
flows() {
    [ -e /tmp/received.$1 ] || grep -q "$(printf ':%04X [0-9A-F]*:[0-9A-F]* 01' $1)" /proc/net/tcp /proc/net/tcp6
}

# listens PORT
listens() {
    grep -q "$(printf ':%04X [0-9A-F]*:0000 0A' $1)" /proc/net/tcp /proc/net/tcp6
}

# received PORT: the length and the SHA-256 of what came.
received() {
    wait_for 20 test -e /tmp/received.$1 && cat /tmp/received.$1
}
