# Helpers for the scenarios of virtual machines. $CLIENT is the program that starts them: `qemu` or `libvirt`.

note "$(qemu-system-x86_64 --version | head -n 1)"
note "$(passt --version | head -n 1)"
# Results of a machine: as many as `check` is called in `init`.
RESULTS_OF_MACHINE=$(grep -c '^check ' /clients/machines/init)

# Makes the kernel and the first root file system of the machines: `kernel` and `root.cpio`.
make_system() {
    version=$(ls /kernel/usr/lib/modules | head -n 1)
    cp /kernel/boot/vmlinuz-$version kernel
    mkdir -p root/bin root/modules
    cp /usr/bin/busybox root/bin
    cp /clients/machines/init /clients/machines/on-lease root
    depmod --basedir /kernel/usr --outdir modules $version 2>/dev/null
    ln -s /kernel/usr/lib/modules/$version/kernel modules/lib/modules/$version/kernel
    # Modules that are not built in, in the order of loading.
    for module in virtio_pci virtio_net af_packet ipv6; do
        modprobe --dirname $PWD/modules --set-version $version --show-depends $module
    done | sed -n 's/^insmod \([^ ]*\).*/\1/p' | while read -r file; do
        name=${file##*/}
        xz -dc $file >root/modules/${name%.xz}
        echo ${name%.xz} >>root/modules/order
    done
    (cd root && find . | cpio --quiet -o -H newc) >root.cpio
}

# words TRANSPORT SOCKET [LOOP]: prints the arguments of QEMU for a machine whose card is on passt.
words() {
    echo -nodefaults -no-user-config -display none -no-reboot -accel tcg -machine q35,memory-backend=memory -m 256 \
        -object memory-backend-memfd,id=memory,size=256M,share=on -kernel kernel -initrd root.cpio \
        -append '"console=ttyS0 quiet mitigations=off panic=-1 rdinit=/init '"${3:-}"'"' -serial file:console
    case $1 in
        stream) echo -netdev stream,id=n,server=off,addr.type=unix,addr.path=$2,reconnect-ms=300 ;;
        vhost-user) echo -chardev socket,id=c,path=$2,reconnect-ms=300 -netdev vhost-user,id=n,chardev=c ;;
    esac
    echo -device virtio-net-pci,netdev=n,mac=52:54:00:12:34:56
}

# machine TRANSPORT SOCKET [LOOP]: starts it; its number is in $machine.
machine() {
    rm -f console
    eval "set -- $(words "$@" | tr '\n' ' ')"
    qemu-system-x86_64 "$@" >qemu.log 2>&1 &
    machine=$!
}

# results: takes the results of a machine over, as checks. $1 stands before each label.
results() {
    local count=0 line
    wait_for 60 grep -q 'RESULT serves' console
    cat qemu.log console
    tr -d '\r' <console | sed -n 's/^RESULT \(ok\|not ok\) /\1 '"$1: /p" >results
    while read -r line; do
        say_check "$line"
    done <results
    count=$(wc -l <results)
    is "$1: the machine has made all of its checks" "$count" "$RESULTS_OF_MACHINE"
    check "$1: a port from outside" outside tcp 192.0.2.2 2022
    check "$1: a port from the loopback of the host" tcp 127.0.0.1 2022
}

# start OPTION...: starts passt in the background, with the ports of every scenario.
start() { passt --no-map-gw -t 2022:22 --pid passt.pid "$@"; }
stop() { kill "$(cat passt.pid)" && wait_for 10 sh -c '! kill -0 '"$(cat passt.pid)"; }
gone() { ! kill -0 "$1" 2>/dev/null; }

make_system || give_up 'no system for machines'
