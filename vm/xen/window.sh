# Helpers for scenarios on a hypervisor with grant windows (xen/ in the repository). Guests of window_guest have the test
# agent and its module (xen/tests).

# create_window_guest NAME [LINE...]: creates a guest with the modules and the test agent, and starts the agent.
create_window_guest() {
    local name=$1
    shift
    guests_with window-tests
    create_guest $name "$@" && guest_ready $name && on $name '
        insmod /lib/window-raw.ko && insmod /lib/ringfence-window.ko &&
        { agent serve >/tmp/agent.log 2>&1 & } && wait_for 20 test -p /run/agent.out'
}

# granter COMMAND...: gives a command to the agent in guest `one`, the granter.
granter() {
    on one "agent $*" | tr -d '\r' | grep .
}
# grantee COMMAND...: gives a command to the agent in guest `two`, the grantee.
grantee() {
    on two "agent $*" | tr -d '\r' | grep .
}

# agent_in_dom0: unpacks the agent in dom0, for operations that only dom0 may do.
agent_in_dom0() {
    (cd / && cpio -i usr/bin/agent lib/iommu-domain.so </boot/window-tests.cpio)
}

# matches LABEL GOT PATTERN: checks that a value matches a shell pattern.
matches() {
    case $2 in
        $3) ok "$1" ;;
        *) not_ok "$1" "'$2' is not like '$3'" ;;
    esac
}

# free_memory: prints the hypervisor's free pages in MiB.
free_memory() {
    xl info | awk '/^free_memory/ { print $3 }'
}

# dump_windows: prints the hypervisor's report of windows.
dump_windows() {
    xl dmesg -c >/dev/null
    xl debug-keys y
    usleep 300000
    xl dmesg
}

# load_window_module NAME: loads the driver from the part `window` of a guest.
load_window_module() {
    on $1 'insmod /lib/ringfence-window.ko && wait_for 5 test -c /dev/ringfence-window'
}

# create_driver_domain CONFIGURATION: checks that a PVH driver domain `net` starts, with a bridge, an image of its own
# (/run/disks/one) and `ringfence serve` with this configuration (\n between its lines).
create_driver_domain() {
    check 'the driver domain is created' create_guest net 'type="pvh"' driver_domain=1
    check 'it takes commands' guest_ready net || give_up 'nothing to see'
    check 'it has the device of windows' load_window_module net
    check 'it has a bridge' create_driver_bridge
    check 'it serves' start_driver_daemon "$1"
}

# create_driver_bridge: creates a bridge in the driver domain, which has dom0's addresses for guests.
create_driver_bridge() {
    on net "mkdir -p /run/disks && truncate -s 16M /run/disks/one; load_modules tun bridge xen-gntdev; ip link add xenbr0 type bridge && ip link set xenbr0 up &&
        ip address add $ADDRESS/24 dev xenbr0 && ip -6 address add $ADDRESS6/64 dev xenbr0"
}

# start_driver_daemon CONFIGURATION: starts the daemon in the driver domain, and waits until it answers.
start_driver_daemon() {
    on net "printf '$1' >/tmp/serve.toml;
        ringfence serve --config /tmp/serve.toml >>/tmp/serve.log 2>&1 & echo \$! >/tmp/serve.pid"
    on net 'wait_for 15 ringfence status'
}

# kill_driver_daemon: kills the daemon in the driver domain, and waits for its end.
kill_driver_daemon() {
    on net 'kill -9 $(cat /tmp/serve.pid); wait_for 10 sh -c "! kill -0 $(cat /tmp/serve.pid) 2>/dev/null"'
}

# run_hotplug_script vif|vbd NAME NUMBER: runs the hotplug script of a device of the driver domain, which has no `xl
# devd`.
run_hotplug_script() {
    local path=/local/domain/$(domain_id net)/backend/$1/$(domain_id $2)/$3
    case $1 in
        vif_line) XENBUS_PATH=$path /etc/xen/scripts/vif-ringfence online ;;
        vbd_path) XENBUS_PATH=$path /etc/xen/scripts/block-ringfence add ;;
    esac
}

# create_guest_with_windows NAME N [QUEUES [TYPE]]: checks that a guest of the driver domain starts (of TYPE `pvh` by
# default), and that `ringfence attach` uses its interface with windows for its buffers.
create_guest_with_windows() {
    local name=$1 number=$2
    SCRIPT=vif-ringfence
    check "guest $name is created" create_guest $name "type=\"${4:-pvh}\"" "$(vif_line $number backend=net)"
    check "$name takes commands" guest_ready $name || give_up 'nothing to see'
    check "$name has the device of windows" load_window_module $name
    on $name 'load_modules tun; echo 4096 >/sys/module/xen_gntalloc/parameters/limit'
    connect_with_windows $name $number 0 ${3:-1}
}

# connect_with_windows NAME N DEVICE QUEUES: checks that `ringfence attach` takes this device from the guest's kernel.
connect_with_windows() {
    local name=$1 number=$2 device=$3
    check "the hotplug script of device $device of $name runs" run_hotplug_script vif $name $device
    on $name "wait_for 20 test -e /sys/bus/xen/drivers/vif/vif-$device; echo vif-$device >/sys/bus/xen/drivers/vif/unbind"
    start_attach_with_windows $name $4 $device
    check "ringfence attach gives $name its interface" configure_network $name $number ||
        note "$(on $name 'tail -n 5 /tmp/attach.log') $(on net 'tail -n 5 /tmp/serve.log')"
}

# start_attach_with_windows NAME QUEUES [DEVICE]: starts `ringfence attach` in a guest.
start_attach_with_windows() {
    on $1 "ringfence attach --device ${3:-0} --name eth0 --windows --queues $2 -v >>/tmp/attach.log 2>&1 & echo \$! >/tmp/attach.pid"
}

# driver_domain_counter NAME: prints the sum of the counters of that name of the daemon in the driver domain.
driver_domain_counter() {
    on net "ringfence status --json" | grep -oE "\"$1\": *[0-9]+" | awk '{ sum += $NF } END { print sum + 0 }'
}

# driver_domain_operations: prints the number of map, unmap and copy operations of that daemon so far.
driver_domain_operations() {
    on net "ringfence status --json" | grep -oE '"grant_(maps|unmaps|copies)": *[0-9]+' |
        awk '{ sum += $NF } END { print sum + 0 }'
}

# count_open_windows: prints the number of registered windows, by the hypervisor.
count_open_windows() {
    dump_windows | grep -c 'registered at gfn'
}

# count_issued_pages: prints the number of issued pages in all windows, by the hypervisor.
count_issued_pages() {
    dump_windows | awk '/ window .* to d/ { for (i = 2; i <= NF; i++) if ($i == "issued,") sum += $(i - 1) }
        END { print sum + 0 }'
}

# granter_counter NAME WHAT: prints a count of the hypervisor for the windows that a domain granted: pages `issued`,
# pages `revoked`, or `busy` (revocations refused because the grantee used the page).
granter_counter() {
    dump_windows | awk -v name="d$(domain_id $1):" -v what="$2," '
        { for (i = 1; i < NF; i++) if ($i == name) for (k = i; k <= NF; k++) if ($k == what) print $(k - 1) }'
}

# stop_driver_daemon: stops the daemon in the driver domain by a signal.
stop_driver_daemon() {
    on net 'kill -STOP $(cat /tmp/serve.pid) && wait_for 5 grep -q "^State:.T" /proc/$(cat /tmp/serve.pid)/status'
}

# guest_free_pages NAME: prints the number of a guest's free pages, without caches.
guest_free_pages() {
    on $1 'echo 3 >/proc/sys/vm/drop_caches; awk "/^MemFree/ { print int(\$2 / 4) }" /proc/meminfo' | tr -d '\r'
}

# raise_status_words FIRST LAST: runs in the driver domain. Sets the status words of these references to "in use" in
# every table of windows that a process has mapped. Prints the number of tables.
raise_status_words() {
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

# no_windows: succeeds if the hypervisor has no window, registered or not.
no_windows() {
    ! dump_windows | grep ' window .* to d'
}

# windows_are_open N: succeeds if N windows are registered.
windows_are_open() {
    [ $(count_open_windows) = $1 ]
}

# only_dom0_is_left: succeeds if no domain but dom0 exists, a zombie included.
only_dom0_is_left() {
    [ $(xl list | wc -l) = 2 ]
}

# find_pci_device VENDOR DEVICE: prints the folder of a PCI device in sysfs.
find_pci_device() {
    local each
    for each in /sys/bus/pci/devices/*; do
        [ "$(cat $each/vendor $each/device | tr '\n' ' ')" != "$1 $2 " ] || echo $each
    done
}

# enable_device FOLDER: enables memory space and bus mastering of a PCI device.
enable_device() {
    echo 1 >$1/enable
    printf '\006' | dd of=$1/config bs=1 seek=4 conv=notrunc 2>/dev/null
}

# create_window_guest_with_iommu NAME [LINE...]: the same as `create_window_guest`, with an IOMMU context.
create_window_guest_with_iommu() {
    LD_PRELOAD=/lib/iommu-domain.so create_window_guest "$@"
}

# assign_device FOLDER DOMAIN: gives a PCI device to a domain.
assign_device() {
    local name=${1##*/}
    local bus=${name#*:} device=${name##*:}
    bus=${bus%%:*}
    # Bus, device and function as the hypervisor has them.
    agent assign $2 $((0x$bus * 256 + 0x${device%%.*} * 8 + ${device##*.})) | grep ok
}

# count_dma_faults: prints the number of DMA faults that the hypervisor reported since the last call.
count_dma_faults() {
    xl dmesg -c | grep -c 'DMAR.*fault addr'
}
