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
    for each in all default; do
        echo 0 >/proc/sys/net/ipv6/conf/$each/accept_dad
    done
}

# load MODULE...
load() {
    for module in "$@"; do
        modprobe "$module" || echo "modprobe $module failed"
    done
}

# Seconds since the machine started.
uptime_now() {
    read -r now idle </proc/uptime
    echo "$now"
}

# wait_for SECONDS COMMAND...: until the command succeeds; tried ten times a second.
wait_for() {
    local left=$(($1 * ${PATIENCE:-4} * 10))
    shift
    until "$@" >/dev/null 2>&1; do
        left=$((left - 1))
        [ $left -gt 0 ] || return 1
        usleep 100000
    done
}

# stream MEBIBYTES: bytes that look random, the same on both ends; no two mebibytes are alike.
stream() {
    local number=0
    while [ $number -lt "$1" ]; do
        number=$((number + 1))
        echo $number
        cat /vm/blob
    done
}

# receive PORT: starts a server that takes one stream and notes its SHA-256.
receive() {
    rm -f /tmp/sum.$1
    # At the end of its input busybox's nc says so to the other end, which then goes away.
    [ -p /tmp/silence ] || mkfifo /tmp/silence
    { nc -l -p $1 <>/tmp/silence | sha256sum >/tmp/sum.$1.new; mv /tmp/sum.$1.new /tmp/sum.$1; } &
    wait_for 10 listens $1
}

# listens PORT
listens() {
    grep -q "$(printf ':%04X [0-9A-F]*:0000 0A' $1)" /proc/net/tcp /proc/net/tcp6
}

# received PORT: the SHA-256 of what came.
received() {
    wait_for 20 test -s /tmp/sum.$1 && cut -d' ' -f1 /tmp/sum.$1
}
