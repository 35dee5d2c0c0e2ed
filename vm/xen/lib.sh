# Helpers for scenarios in dom0: guests, what they do, networks, transfers.

BACKEND=/local/domain/0/backend
ADDRESS=10.77.0.1
ADDRESS6=fd77::1
# The root file system of a guest takes as much of its memory as it needs: a tmpfs gets half of what is free. While it is
# unpacked, its archive is in memory beside it.
KERNEL_OPTIONS='quiet loglevel=4 mitigations=off cryptomgr.notests rdinit=/init panic=1 rootfstype=ramfs'

# create_guest NAME [LINE...]: creates a guest with these lines in its configuration, and does not wait for it. Its
# console is in guests/guest-NAME.log. Settings for the guests that follow: MEMORY (MiB), VCPUS, PINNED (each guest on
# one processor), KERNEL, RAMDISK (first root file system; none if empty), EXTRA (words for the kernel's command
# line), GUESTS_TYPE, CREATE (options of `xl create`).
create_guest() {
    local name=$1 line
    shift
    {
        echo "name=\"$name\""
        echo "kernel=\"${KERNEL:-/boot/vmlinux}\""
        [ -z "${RAMDISK-default}" ] || echo "ramdisk=\"${RAMDISK:-/boot/guest.cpio}\""
        echo "memory=${MEMORY:-160}"
        echo "vcpus=${VCPUS:-1}"
        [ -z "${GUESTS_TYPE:-}" ] || echo "type=\"$GUESTS_TYPE\""
        [ -z "${PINNED:-}" ] || echo "cpus=\"$(($(ls /tmp/*.cfg | wc -l) % $(nproc)))\""
        echo "extra=\"console=hvc0 $KERNEL_OPTIONS ${EXTRA:-}\""
        echo 'on_crash="destroy"'
        echo 'on_poweroff="destroy"'
        for line in "$@"; do echo "$line"; done
    } >/tmp/$name.cfg
    rm -f /tmp/$name.tty
    xl create -q ${CREATE:-} /tmp/$name.cfg
}

# guests_with PART...: gives the guests that follow these parts (`tools`: programs of ext4; `bench`: ringfence-bench),
# and memory for them. A caller of the scenario adds a part by GUESTS_PART, and its memory by GUESTS_MEMORY.
guests_with() {
    local part
    set -- "$@" ${GUESTS_PART:-}
    RAMDISK=/run/guest-$(echo $* | tr ' ' -).cpio
    MEMORY=${GUESTS_MEMORY:-192}
    [ ! -e $RAMDISK ] || return 0
    for part in guest "$@"; do
        cat /boot/$part.cpio >>$RAMDISK || give_up "the part $part does not fit in /run"
    done
}

# guest_ready NAME...: waits until the guests take commands.
guest_ready() {
    local name line
    for name in "$@"; do
        find_console $name || return 1
        while read -r -t $((40 * PATIENCE)) line; do
            case $line in
                *@ready*) continue 2 ;;
                *'Initramfs unpacking failed'*) echo "guest $name: $line" && return 1 ;;
            esac
        done <$(cat /tmp/$name.tty)
        echo "guest $name is not ready"
        return 1
    done
}

# find_console NAME: records the terminal of a guest's console. A restored guest has a new one.
find_console() {
    wait_for 10 has_console $1 || { echo "guest $1 has no console"; return 1; }
    xenstore-read /local/domain/$(domain_id $1)/console/tty >/tmp/$1.tty
}

# has_console NAME: succeeds if the store has the terminal of the guest's console.
has_console() {
    [ -n "$(xenstore-read /local/domain/$(domain_id $1)/console/tty)" ]
}

# domain_id NAME: prints the number of a domain.
domain_id() {
    xl domid $1
}

# on NAME COMMAND: runs the command in a guest (or in `dom0`), and returns its output and status. Status 124: the
# guest did not answer for ON_LIMIT seconds.
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

# read_key PATH: prints a value of the store, or nothing.
read_key() {
    xenstore-read $1 2>/dev/null
}

# key_is PATH VALUE: succeeds if the key has this value.
key_is() {
    [ "$(read_key $1)" = "$2" ]
}

# create_bridge: creates dom0's bridge xenbr0 with dom0's addresses.
create_bridge() {
    ip link add xenbr0 type bridge && ip link set xenbr0 up &&
        ip address add $ADDRESS/24 dev xenbr0 && ip -6 address add $ADDRESS6/64 dev xenbr0
}

# assign_addresses NAME N: gives eth0 of a guest the addresses 10.77.0.N and fd77::N.
assign_addresses() {
    on $1 "wait_for 20 test -e /sys/class/net/eth0 && ip link set eth0 up &&
        ip address add 10.77.0.$2/24 dev eth0 && ip -6 address add fd77::$2/64 dev eth0"
}

# cpu_seconds NAME: prints the processor time of a domain.
cpu_seconds() {
    xl list | awk -v name=$1 '$1 == name { print $6 }'
}

# cpu_used NAME EARLIER: prints the processor time of a domain since `cpu_seconds` printed EARLIER.
cpu_used() {
    awk "BEGIN { printf \"%.1f\", $(cpu_seconds $1) - $2 }"
}

# check_transfer LABEL FROM TO ADDRESS MEBIBYTES: checks that a TCP stream between two domains (`dom0`, or a guest)
# arrives with the right SHA-256.
check_transfer() {
    local label=$1 from=$2 to=$3 address=$4 size=$5 time
    PORT=$((${PORT:-5000} + 1))
    on $to "start_receiver $PORT" || { not_ok "$label" "$to does not listen"; return 1; }
    time=$(ON_LIMIT=$((20 + size * 2)) on $from "traffic send $address $PORT $size 2>&1") ||
        { not_ok "$label" "$from: $time"; return 1; }
    is "$label" "$(on $to "received_stream $PORT")" "$(stream_sum $size)" || return 1
    note "$label: $size MiB in $time"
}

# stream_sum MEBIBYTES: prints the length and the SHA-256 of such a stream, in the form of `received_stream`.
stream_sum() {
    [ -s /run/stream.$1 ] || traffic sum $1 >/run/stream.$1
    cat /run/stream.$1
}

# The rest of what scenarios share.
. /vm/xen/net.sh
. /vm/xen/disk.sh
. /vm/xen/left.sh
