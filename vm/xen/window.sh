# Helpers for scenarios on a hypervisor with grant windows (xen/ in the repository). Guests of window_guest have the test
# agent and its module (xen/tests).

# window_guest NAME [LINE...]: a guest with the modules and the agent.
window_guest() {
    local name=$1
    shift
    guests_with window-tests
    guest $name "$@" && guest_ready $name && on $name '
        insmod /lib/window-raw.ko && insmod /lib/ringfence-window.ko &&
        { agent serve >/tmp/agent.log 2>&1 & } && wait_for 20 test -p /run/agent.out'
}

# a, b COMMAND...: a command to the agent in the granter, in the grantee.
a() {
    on one "agent $*" | tr -d '\r' | grep .
}
b() {
    on two "agent $*" | tr -d '\r' | grep .
}

# agent_in_dom0: the agent is there, too, for what only dom0 may do.
agent_in_dom0() {
    (cd / && cpio -i usr/bin/agent lib/iommu-domain.so </boot/window-tests.cpio)
}

# like LABEL GOT PATTERN
like() {
    case $2 in
        $3) ok "$1" ;;
        *) not_ok "$1" "'$2' is not like '$3'" ;;
    esac
}

# free_memory: the hypervisor's free pages in MiB.
free_memory() {
    xl info | awk '/^free_memory/ { print $3 }'
}

# dump_windows: what the hypervisor knows of windows.
dump_windows() {
    xl dmesg -c >/dev/null
    xl debug-keys y
    usleep 300000
    xl dmesg
}

# window_module NAME: loads the driver from the part `window` of a guest.
window_module() {
    on $1 'insmod /lib/ringfence-window.ko && wait_for 5 test -c /dev/ringfence-window'
}

# driver_domain CONFIGURATION: 5 checks. A PVH driver domain `net`, with a bridge and an image of its own
# (/run/disks/one), whose `ringfence serve` has this configuration, with \n between its lines.
driver_domain() {
    CONFIGURATION=$1
    check 'the driver domain is created' guest net 'type="pvh"' driver_domain=1
    check 'it takes commands' guest_ready net || give_up 'nothing to see'
    check 'it has the device of windows' window_module net
    check 'it has a bridge' bridged
    check 'it serves' serving
}

# bridged: the driver domain has a bridge of its own; it, not dom0, is who guests talk to.
bridged() {
    on net "mkdir -p /run/disks && truncate -s 16M /run/disks/one; load tun bridge xen-gntdev; ip link add xenbr0 type bridge && ip link set xenbr0 up &&
        ip address add $ADDRESS/24 dev xenbr0 && ip -6 address add $ADDRESS6/64 dev xenbr0"
}

serving() {
    on net "printf '$CONFIGURATION' >/tmp/serve.toml;
        ringfence serve --config /tmp/serve.toml >>/tmp/serve.log 2>&1 & echo \$! >/tmp/serve.pid"
    on net 'wait_for 15 ringfence status'
}

# died: the driver domain's daemon is killed, and gone.
died() {
    on net 'kill -9 $(cat /tmp/serve.pid); wait_for 10 sh -c "! kill -0 $(cat /tmp/serve.pid) 2>/dev/null"'
}

# plugged vif|vbd NAME NUMBER: the hotplug script of a device of the driver domain, which has no `xl devd`.
plugged() {
    local path=/local/domain/$(domain net)/backend/$1/$(domain $2)/$3
    case $1 in
        vif) XENBUS_PATH=$path /etc/xen/scripts/vif-ringfence online ;;
        vbd) XENBUS_PATH=$path /etc/xen/scripts/block-ringfence add ;;
    esac
}

# attached_windows NAME N [QUEUES]: 5 checks. A guest of the driver domain, PVH unless TYPE is pv, whose interface
# `ringfence attach` has, with windows for its buffers.
attached_windows() {
    local name=$1 number=$2
    SCRIPT=vif-ringfence
    check "guest $name is created" guest $name "type=\"${TYPE:-pvh}\"" "$(vif $number backend=net)"
    check "$name takes commands" guest_ready $name || give_up 'nothing to see'
    check "$name has the device of windows" window_module $name
    on $name 'load tun; echo 4096 >/sys/module/xen_gntalloc/parameters/limit'
    connected_windows $name $number 0 ${3:-1}
}

# connected_windows NAME N DEVICE QUEUES: 2 checks. `ringfence attach` takes this device from the guest's kernel.
connected_windows() {
    local name=$1 number=$2 device=$3
    check "the hotplug script of device $device of $name runs" plugged vif $name $device
    on $name "wait_for 20 test -e /sys/bus/xen/drivers/vif/vif-$device; echo vif-$device >/sys/bus/xen/drivers/vif/unbind"
    attach_windows $name $4 $device
    check "ringfence attach gives $name its interface" again_with_address $name $number ||
        note "$(on $name 'tail -n 5 /tmp/attach.log') $(on net 'tail -n 5 /tmp/serve.log')"
}

# attach_windows NAME QUEUES [DEVICE]: starts `ringfence attach`.
attach_windows() {
    on $1 "ringfence attach --device ${3:-0} --name eth0 --windows --queues $2 -v >>/tmp/attach.log 2>&1 & echo \$! >/tmp/attach.pid"
}

# total NAME: a counter of the daemon in the driver domain, summed over what has it.
total() {
    on net "ringfence status --json" | grep -oE "\"$1\": *[0-9]+" | awk '{ sum += $NF } END { print sum + 0 }'
}

# operations_of_driver: its map, unmap and copy operations so far.
operations_of_driver() {
    on net "ringfence status --json" | grep -oE '"grant_(maps|unmaps|copies)": *[0-9]+' |
        awk '{ sum += $NF } END { print sum + 0 }'
}

# windows_open: registered windows, by the hypervisor.
windows_open() {
    dump_windows | grep -c 'registered at gfn'
}

# pages_issued: in all windows, by the hypervisor.
pages_issued() {
    dump_windows | awk '/ window .* to d/ { for (i = 2; i <= NF; i++) if ($i == "issued,") sum += $(i - 1) }
        END { print sum + 0 }'
}

# granted NAME WHAT: of the windows that a domain granted so far, by the hypervisor: pages issued, pages revoked, or
# revocations that were refused because the grantee was busy.
granted() {
    dump_windows | awk -v name="d$(domain $1):" -v what="$2," '
        { for (i = 1; i < NF; i++) if ($i == name) for (k = i; k <= NF; k++) if ($k == what) print $(k - 1) }'
}

# stopped: the driver domain's daemon is stopped by a signal.
stopped() {
    on net 'kill -STOP $(cat /tmp/serve.pid) && wait_for 5 grep -q "^State:.T" /proc/$(cat /tmp/serve.pid)/status'
}

# free_pages: those of guest `one`.
free_pages() {
    on one 'echo 3 >/proc/sys/vm/drop_caches; awk "/^MemFree/ { print int(\$2 / 4) }" /proc/meminfo' | tr -d '\r'
}

# raise_words FIRST LAST: in the driver domain. The status words of these references say that the page is in use, in every
# table of windows that a process has mapped. Prints the number of tables.
raise_words() {
    local maps pid range word tables=0
    for maps in /proc/[0-9]*/maps; do
        pid=${maps#/proc/}
        pid=${pid%/maps}
        for range in $(awk '$3 == "00000000" && /ringfence-window/ { print $1 }' $maps 2>/dev/null); do
            tables=$((tables + 1))
            word=$1
            while [ $word -le $2 ]; do
                printf '\001\000\000\000' | dd of=/proc/$pid/mem bs=4 conv=notrunc \
                    seek=$(((0x${range%%-*} + word * 8 + 4) / 4)) 2>/dev/null || return 1
                word=$((word + 1))
            done
        done
    done
    echo $tables
}

# windows_none: the hypervisor has no window, registered or not.
windows_none() {
    ! dump_windows | grep ' window .* to d'
}

# windows_are N
windows_are() {
    [ $(windows_open) = $1 ]
}

# alone: no domain but dom0 is there, not even a zombie.
alone() {
    [ $(xl list | wc -l) = 2 ]
}

# device_of VENDOR DEVICE: the folder of a PCI device in sysfs.
device_of() {
    local each
    for each in /sys/bus/pci/devices/*; do
        [ "$(cat $each/vendor $each/device | tr '\n' ' ')" != "$1 $2 " ] || echo $each
    done
}

# enable_device FOLDER: memory space and bus master.
enable_device() {
    echo 1 >$1/enable
    printf '\006' | dd of=$1/config bs=1 seek=4 conv=notrunc 2>/dev/null
}

# with_iommu NAME [LINE...]: a guest of window_guest with an IOMMU context.
with_iommu() {
    LD_PRELOAD=/lib/iommu-domain.so window_guest "$@"
}

# assigned FOLDER: the device is given to the domain $B.
assigned() {
    local name=${1##*/}
    local bus=${name#*:} device=${name##*:}
    bus=${bus%%:*}
    # Bus, device and function as the hypervisor has them.
    agent assign $B $((0x$bus * 256 + 0x${device%%.*} * 8 + ${device##*.})) | grep ok
}

# faults: DMA faults that the hypervisor reported since the last call.
faults() {
    xl dmesg -c | grep -c 'DMAR.*fault addr'
}
