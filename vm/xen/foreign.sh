# Helpers for scenarios with foreign ends (`# parts:`): QEMU's backends in dom0, GRUB as a guest's kernel.

QEMU=/usr/libexec/xen-qemu-system-i386
QEMU_NEWEST=/usr/libexec/xen-qemu-newest

# qemu_nic PROGRAM NAME N: starts QEMU as the backend of an interface of the guest, with a MAC address of that number, and a TAP
# of this name in the bridge. libxl cannot ask for this backend, so QEMU itself writes both directories. Its process is in QEMU_PID.
qemu_nic() {
    local program=$1 name=$2 mac=$(printf 00:16:3e:77:00:%02x $3) tap=qemu$3
    local net="ifname=$tap,script=no,downscript=no"
    set -- -M xenpv -xen-domid $(domain $name) -xen-attach -nodefaults -display none -monitor none -serial none
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

# qnic NAME: the directory of QEMU's backend.
qnic() {
    echo $BACKEND/qnic/$(domain $1)/0
}

# qnic_connected NAME: both ends say so.
qnic_connected() {
    key_is $(qnic $1)/state 4 && key_is /local/domain/$(domain $1)/device/vif/0/state 4
}

# qnic_bound NAME DRIVER: a driver of the guest, which looks for none by itself, gets the interface, and both ends are connected.
# QEMU writes the keys of an interface one by one, and a driver that reads them in between finds no backend.
qnic_bound() {
    local front=/local/domain/$(domain $1)/device/vif/0
    wait_for 20 sh -c "xenstore-read $front/backend $front/backend-id $front/mac $front/state" &&
        on $1 "wait_for 20 test -e /sys/bus/xen/devices/vif-0 && echo vif-0 >/sys/bus/xen/drivers/$2/bind;
            echo 1 >/sys/bus/xen/drivers_autoprobe" && wait_for 20 qnic_connected $1
}

# qnic_ends NAME: both ends in the store, and what went through.
qnic_ends() {
    xenstore-ls $(qnic $1)
    xenstore-ls /local/domain/$(domain $1)/device/vif/0
    on $1 'ip -s link show eth0; ethtool -S eth0; dmesg | tail -n 5'
    tail -n 3 /share/qemu-$1.log
}

# gone_with_qemu NAME: 1 check. The guest is destroyed and QEMU ended; the hypervisor has nothing of the guest.
gone_with_qemu() {
    local number=$(domain $1)
    check "$1 is destroyed, and with QEMU nothing of it stays" destroyed_with_qemu $1 $number
}

destroyed_with_qemu() {
    xl destroy $1 && kill $QEMU_PID && wait_for 10 nothing_left $2 ||
        { xl list; grants_in_use $2; channels_to $2; return 1; }
}

# grub_image NAME KERNEL [WORD...]: makes an image for a disk with an ext2 file system: GRUB's configuration, a Linux kernel of
# dom0 and the guests' first root file system. The kernel's command line has these words too.
grub_image() {
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
    image $name $(($(du -sm $root | cut -f 1) + 8)) && mkfs.ext4 -q -t ext2 -b 4096 -d $root $DISKS/$name && rm -r $root
}

# number FILE OFFSET FORMAT: the number at that offset of a file, in od's format, such as u4 for 4 bytes.
number() {
    od -An -t $3 -j $2 -N ${3#?} $1 | tr -d ' '
}

# kernel_for_pv_grub: path of the release's kernel: the packed one, or the unpacked one if it is packed with zstd (Debian 13's),
# which GRUB 2.12 cannot unpack for a PV guest. Offsets are those of the kernel's boot protocol.
kernel_for_pv_grub() {
    local packed=/boot/vmlinuz content
    content=$((($(number $packed 497 u1) + 1) * 512 + $(number $packed 584 u4)))
    case $(number $packed $content x4) in
        fd2fb528) echo /boot/vmlinux ;;
        *) echo $packed ;;
    esac
}

# grub_boots NAME GRUB LINE...: 4 checks. A guest whose kernel is this image of GRUB boots Linux from its disk, whose line is the
# next argument, and reads all of the disk.
grub_boots() {
    local name=$1 grub=$2
    shift 2
    KERNEL=/boot/grub-xen/$grub RAMDISK=
    check "$name: a guest with GRUB as its kernel is created" guest $name "$@" || give_up "$(tail -n 3 /var/log/xen/*$name*.log)"
    unset KERNEL RAMDISK
    check "$name: GRUB hands over to Linux, which takes commands" guest_ready $name ||
        give_up "$(tail -n 5 /share/guests/guest-$name.log | tr '\r' ' ')"
    check "$name: Linux has the disk" on $name 'load crc32c_generic ext4; wait_for 20 test -b /dev/xvda && mkdir -p /mnt/disk && mount -t ext4 -o ro /dev/xvda /mnt/disk'
    is "$name: the disk's SHA-256" "$(ON_LIMIT=60 on $name 'sha256sum </dev/xvda' | tr -d '\r')" "$(sha256sum <$DISKS/$name)"
}
