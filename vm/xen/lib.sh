# Helpers for scenarios in dom0: guests, what they do, networks, transfers.

BACKEND=/local/domain/0/backend
ADDRESS=10.77.0.1
ADDRESS6=fd77::1

# guest NAME [LINE...]: makes a guest with these lines in its configuration, and does not wait; with the
# options of `xl create` in CREATE, the kernel in KERNEL, its first root file system in RAMDISK (empty: none), and the
# type in GUESTS_TYPE. Its console is in guests/guest-NAME.log.
guest() {
    local name=$1 line
    shift
    {
        echo "name=\"$name\""
        echo "kernel=\"${KERNEL:-/boot/vmlinux}\""
        [ -z "${RAMDISK-default}" ] || echo "ramdisk=\"${RAMDISK:-/boot/guest.cpio}\""
        echo "memory=${MEMORY:-128}"
        echo "vcpus=${VCPUS:-1}"
        [ -z "${GUESTS_TYPE:-}" ] || echo "type=\"$GUESTS_TYPE\""
        [ -z "${PINNED:-}" ] || echo "cpus=\"$(($(ls /tmp/*.cfg | wc -l) % $(nproc)))\""
        echo "extra=\"console=hvc0 quiet loglevel=4 mitigations=off cryptomgr.notests rdinit=/init panic=1 ${EXTRA:-}\""
        echo 'on_crash="destroy"'
        echo 'on_poweroff="destroy"'
        for line in "$@"; do echo "$line"; done
    } >/tmp/$name.cfg
    rm -f /tmp/$name.tty
    xl create -q ${CREATE:-} /tmp/$name.cfg
}

# guests_with PART...: the guests that follow have these parts too (`tools`: the programs of ext4; `bench`:
# ringfence-bench), and memory for them. A scenario's own part is in GUESTS_PART, and their memory in GUESTS_MEMORY.
guests_with() {
    local part
    set -- "$@" ${GUESTS_PART:-}
    RAMDISK=/run/guest-$(echo $* | tr ' ' -).cpio
    MEMORY=${GUESTS_MEMORY:-192}
    [ ! -e $RAMDISK ] || return 0
    for part in guest "$@"; do cat /boot/$part.cpio; done >$RAMDISK
}

# guest_ready NAME...: waits until the guests take commands.
guest_ready() {
    local name line
    for name in "$@"; do
        console $name || return 1
        while read -r -t $((40 * PATIENCE)) line; do
            case $line in *@ready*) continue 2 ;; esac
        done <$(cat /tmp/$name.tty)
        echo "guest $name is not ready"
        return 1
    done
}

# console NAME: finds a guest's console; needed again after it was restored.
console() {
    wait_for 10 has_console $1 || { echo "guest $1 has no console"; return 1; }
    xenstore-read /local/domain/$(domain $1)/console/tty >/tmp/$1.tty
}

has_console() {
    [ -n "$(xenstore-read /local/domain/$(domain $1)/console/tty)" ]
}

# domain NAME: its number.
domain() {
    xl domid $1
}

# on NAME COMMAND: runs the command in a guest (or in `dom0`), with its output and its status.
# Status 124: it did not answer for ON_LIMIT seconds.
on() {
    local name=$1 command id line heard=
    shift
    [ $name != dom0 ] || { (eval "$*") </dev/null; return; }
    # The guest reads one line.
    command=$(echo "$*" | tr '\n' ' ')
    read -r id </proc/sys/kernel/random/uuid
    {
        printf '%s %s\n' $id "$command" >&7
        while read -r -t $((${ON_LIMIT:-30} * PATIENCE)) line <&7; do
            case $line in
                "@begin $id") heard=yes ;;
                "@end $id "*) return ${line##* } ;;
                '') ;;
                *) [ -z "$heard" ] || printf '%s\n' "$line" ;;
            esac
        done
    } 7<>$(cat /tmp/$name.tty)
    echo "guest $name does not answer"
    return 124
}

# key PATH: the value in the store, or nothing.
key() {
    xenstore-read $1 2>/dev/null
}

# key_is PATH VALUE
key_is() {
    [ "$(key $1)" = "$2" ]
}

# bridge: makes dom0's bridge, xenbr0, with dom0's addresses.
bridge() {
    ip link add xenbr0 type bridge && ip link set xenbr0 up &&
        ip address add $ADDRESS/24 dev xenbr0 && ip -6 address add $ADDRESS6/64 dev xenbr0
}

# address NAME N: gives eth0 of a guest its addresses, 10.77.0.N and fd77::N.
address() {
    on $1 "wait_for 20 test -e /sys/class/net/eth0 && ip link set eth0 up &&
        ip address add 10.77.0.$2/24 dev eth0 && ip -6 address add fd77::$2/64 dev eth0"
}

# cpu_seconds NAME: the processor time that a domain has used.
cpu_seconds() {
    xl list | awk -v name=$1 '$1 == name { print $6 }'
}

# cpu_used NAME UNTIL_NOW: the processor time that a domain has used since it had used so much.
cpu_used() {
    awk "BEGIN { printf \"%.1f\", $(cpu_seconds $1) - $2 }"
}

# transfer LABEL FROM TO ADDRESS MEBIBYTES: a check: a TCP stream from one domain to the other
# (`dom0`, or a guest) arrives with the SHA-256 that it has to have.
transfer() {
    local label=$1 from=$2 to=$3 address=$4 size=$5 time
    PORT=$((${PORT:-5000} + 1))
    on $to "receive $PORT" || { not_ok "$label" "$to does not listen"; return 1; }
    time=$(ON_LIMIT=$((20 + size * 2)) on $from "traffic send $address $PORT $size 2>&1") ||
        { not_ok "$label" "$from: $time"; return 1; }
    is "$label" "$(on $to "received $PORT")" "$(stream_sum $size)" || return 1
    note "$label: $size MiB in $time"
}

# stream_sum MEBIBYTES: the length and the SHA-256 of such a stream, as `received` has it.
stream_sum() {
    [ -s /run/stream.$1 ] || traffic sum $1 >/run/stream.$1
    cat /run/stream.$1
}

# since UPTIME: seconds since then.
since() {
    awk "BEGIN { printf \"%.1f\", $(uptime_now) - $1 }"
}

# The rest of what scenarios share.
. /vm/xen/net.sh
. /vm/xen/disk.sh
. /vm/xen/left.sh
