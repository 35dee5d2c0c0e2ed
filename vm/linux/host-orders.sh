#!/bin/sh
# Orders of a machine to its host, one after the other: host-orders.sh RINGFENCE TRAFFIC SHARE
#
# A machine writes an order to the file `order` in the folder SHARE (`on_host` in lib.sh). The host writes the output to
# `order.out` and then the status to `order.status`.
#
# | order | effect |
# |---|---|
# | `kill NAME` | kills the process whose id is in /dev/shm/NAME.pid |
# | `scan NAME` | searches its memory, and that of its descendants, for the secret in SHARE/secret (canary.py) |
# | `peer WORD...` | runs a command in the guest `peer` of `ringfence run` |
# | `plug NAME OPTION...`, `unplug NAME` | plugs the disk at /dev/shm/NAME.socket into the machine's slot, or out of it (monitor.py) |
# | `boot NAME` | boots another machine by its firmware off the disk at /dev/shm/NAME.socket, and prints the text on its console |
set -u
ringfence=$1 traffic=$2 share=$3
here=$(dirname "$0")
PATH=$(dirname "$traffic"):$PATH

# boot_firmware NAME: succeeds if the machine ends by a write of 0 to the device `isa-debug-exit` (firmware.py).
boot_firmware() {
    # QEMU 7.2 crashes with MSI-X under emulation.
    setpriv --pdeathsig KILL -- qemu-system-x86_64 -accel tcg -machine q35,memory-backend=memory -m 64 \
        -object memory-backend-memfd,id=memory,size=64M,share=on -nodefaults -no-user-config -display none \
        -chardev "socket,id=disk,path=/dev/shm/$1.socket,$RECONNECT" \
        -device vhost-user-blk-pci,chardev=disk,num-queues=1,vectors=0,bootindex=1 \
        -device isa-debug-exit,iobase=0xf4,iosize=1 -serial stdio
    # The value that was written, doubled, plus 1.
    test $? = 1
}

execute() {
    local order=$1
    shift
    case $order in
        kill) kill -KILL "$(cat "/dev/shm/$1.pid")" ;;
        scan)
            touch "$share/scan"
            python3 "$here/canary.py" "$share" "/dev/shm/$1.pid" && cat "$share/scanned"
            ;;
        peer) "$ringfence" exec peer -- "$@" ;;
        plug | unplug) timeout 60 python3 "$here/monitor.py" "$order" "$@" ;;
        boot) boot_firmware "$1" ;;
        *) echo "no order is called $order" && return 1 ;;
    esac
}

while :; do
    until [ -e "$share/order" ]; do sleep 0.1; done
    # Words on purpose.
    # shellcheck disable=SC2046
    execute $(cat "$share/order") >"$share/order.out" 2>&1 </dev/null
    echo $? >"$share/order.new"
    rm "$share/order"
    mv "$share/order.new" "$share/order.status"
done
