# Helpers for scenarios with foreign ends (`# parts:`): QEMU's backends in dom0, GRUB as a guest's kernel.

QEMU=/usr/libexec/xen-qemu-system-i386
QEMU_NEWEST=/usr/libexec/xen-qemu-newest

# start_qemu_nic PROGRAM NAME N: starts QEMU as the backend of a guest's interface, with a MAC address of that number
# and a TAP in the bridge. QEMU itself writes both directories, because libxl cannot ask for this backend. Sets
# QEMU_PID.
start_qemu_nic() {
    local program=$1 name=$2 mac=$(printf 00:16:3e:77:00:%02x $3) tap=qemu$3
    local net="ifname=$tap,script=no,downscript=no"
    set -- -M xenpv -xen-domid $(domain_id $name) -xen-attach -nodefaults -display none -monitor none -serial none
    if [ $program = $QEMU_NEWEST ]; then
        set -- "$@" -netdev tap,id=net,$net -device xen-net-device,netdev=net,mac=$mac,idx=0
    else
        # The number of the interface is that of the hub.
        set -- "$@" -net nic,model=xen,macaddr=$mac -net tap,$net
    fi
    $program "$@" >>/share/qemu-$name.log 2>&1 &
    QEMU_PID=$!
    wait_for 20 test -e /sys/class/net/$tap && ip link set $tap master xenbr0 && ip link set $tap up
}

# qnic_path NAME: prints the directory of QEMU's backend.
qnic_path() {
    echo $BACKEND/qnic/$(domain_id $1)/0
}

# qnic_connected NAME: succeeds if both ends are connected.
qnic_connected() {
    key_is $(qnic_path $1)/state 4 && key_is /local/domain/$(domain_id $1)/device/vif/0/state 4
}

# bind_qnic NAME DRIVER: binds the interface to a driver of the guest, and waits until both ends are connected. The
# driver must not look for interfaces by itself: QEMU writes the keys one by one, and a driver that reads them in
# between finds no backend.
bind_qnic() {
    local front=/local/domain/$(domain_id $1)/device/vif/0
    wait_for 20 sh -c "xenstore-read $front/backend $front/backend-id $front/mac $front/state" &&
        on $1 "wait_for 20 test -e /sys/bus/xen/devices/vif-0 && echo vif-0 >/sys/bus/xen/drivers/$2/bind;
            echo 1 >/sys/bus/xen/drivers_autoprobe" && wait_for 20 qnic_connected $1
}

# qnic_state NAME: prints both ends in the store, and the packets of the interface.
qnic_state() {
    xenstore-ls $(qnic_path $1)
    xenstore-ls /local/domain/$(domain_id $1)/device/vif/0
    on $1 'ip -s link show eth0; ethtool -S eth0; dmesg | tail -n 5'
    tail -n 3 /share/qemu-$1.log
}

# check_destruction_with_qemu NAME: checks that nothing is left of a guest that was destroyed, after its QEMU has
# ended.
check_destruction_with_qemu() {
    local number=$(domain_id $1)
    check "$1 is destroyed, and with QEMU nothing of it stays" destroy_guest_and_qemu $1 $number
}

destroy_guest_and_qemu() {
    xl destroy $1 && kill $QEMU_PID && wait_for 10 nothing_left $2 ||
        { xl list; grants_in_use $2; channels_to $2; return 1; }
}

# create_grub_image NAME KERNEL [WORD...]: creates an image for a disk with an ext2 file system: GRUB's configuration,
# a Linux kernel of dom0 and the guests' first root file system. The words are added to the kernel's command line.
create_grub_image() {
    local name=$1 kernel=$2 root=/run/grub-root
    shift 2
    rm -rf $root && mkdir -p $root/boot/grub && cp $kernel $root/boot/kernel &&
        cp /boot/guest.cpio $root/boot/root.cpio || return 1
    cat >$root/boot/grub/grub.cfg <<END
echo "GRUB reads the kernel"
linux /boot/kernel console=hvc0 quiet loglevel=4 mitigations=off cryptomgr.notests rdinit=/init panic=1 $*
echo "GRUB reads the root file system"
initrd /boot/root.cpio
echo "GRUB boots"
boot
END
    create_image $name $(($(du -sm $root | cut -f 1) + 8)) && mkfs.ext4 -q -t ext2 -b 4096 -d $root $DISKS/$name && rm -r $root
}

# read_number FILE OFFSET FORMAT: prints the number at an offset of a file, in a format of od such as u4 for 4 bytes.
read_number() {
    od -An -t $3 -j $2 -N ${3#?} $1 | tr -d ' '
}

# kernel_for_pv_grub: prints the path of the release's kernel: the packed one, or the unpacked one if it is packed
# with zstd (Debian 13), which GRUB 2.12 cannot unpack for a PV guest. The offsets are those of the kernel's boot
# protocol.
kernel_for_pv_grub() {
    local packed=/boot/vmlinuz content
    content=$((($(read_number $packed 497 u1) + 1) * 512 + $(read_number $packed 584 u4)))
    case $(read_number $packed $content x4) in
        fd2fb528) echo /boot/vmlinux ;;
        *) echo $packed ;;
    esac
}

# check_grub_boots NAME GRUB LINE...: checks that a guest whose kernel is this image of GRUB boots Linux from its
# disk, and can read all of the disk. LINE is the disk's configuration line.
check_grub_boots() {
    local name=$1 grub=$2
    shift 2
    KERNEL=/boot/grub-xen/$grub RAMDISK=
    check "$name: a guest with GRUB as its kernel is created" create_guest $name "$@" || give_up "$(tail -n 3 /var/log/xen/*$name*.log)"
    unset KERNEL RAMDISK
    check "$name: GRUB hands over to Linux, which takes commands" guest_ready $name ||
        give_up "$(tail -n 5 /share/guests/guest-$name.log | tr '\r' ' ')"
    check "$name: Linux has the disk" on $name 'load_modules crc32c_generic ext4; wait_for 20 test -b /dev/xvda && mkdir -p /mnt/disk && mount -t ext4 -o ro /dev/xvda /mnt/disk'
    is "$name: the disk's SHA-256" "$(ON_LIMIT=60 on $name 'sha256sum </dev/xvda' | tr -d '\r')" "$(sha256sum <$DISKS/$name)"
}
