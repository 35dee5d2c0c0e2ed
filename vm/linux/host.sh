# Helpers for the hosts of machines (passt-host.sh, devices-host.sh): processes beside QEMU, which end with it. `$share` is the
# folder that host and machine share.

# Option by which QEMU's sockets connect again a second after they were closed. Each release knows one of both.
case $(qemu-system-x86_64 --version) in
    *' version '[1-9].*) RECONNECT=reconnect=1 ;;
    *) RECONNECT=reconnect-ms=1000 ;;
esac
export RECONNECT

# beside COMMAND...: runs a command until QEMU ends.
beside() { setpriv --pdeathsig KILL -- "$@" & }

# keep NAME COMMAND...: runs a command, and starts it again whenever it ends. Its process id is in /dev/shm/NAME.pid, its
# output in SHARE/NAME.out, its standard error in SHARE/NAME.log.
keep() {
    # shellcheck disable=SC2016
    beside sh -c '
        share=$0 name=$1
        shift
        exec 2>>"$share/$name.log"
        # The command ends with this loop.
        while :; do
            setpriv --pdeathsig KILL -- "$@" >>"$share/$name.out" &
            echo $! >"/dev/shm/$name.pid"
            wait $! || true
            sleep 0.1
        done
    ' "$share" "$@"
}

# keep_storage_daemon NAME [OPTION]: keeps a qemu-storage-daemon for the image /dev/shm/NAME.img, with the socket
# /dev/shm/NAME.backend. OPTION is one for the image's node.
keep_storage_daemon() {
    keep "$1" qemu-storage-daemon --blockdev "driver=file,node-name=f,filename=/dev/shm/$1.img${2:+,$2}" \
        --export "type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path=/dev/shm/$1.backend,writable=on"
}

# slot: prints QEMU's options for a slot of the machine, into which `monitor.py` plugs a disk.
slot() { echo '-device pcie-root-port,id=plug,chassis=1,addr=0x18 -qmp unix:/dev/shm/monitor,server=on,wait=off'; }

# wait_for_files PATH...: waits until each of them is there.
wait_for_files() {
    local each
    for each in "$@"; do
        until [ -e "$each" ]; do sleep 0.1; done
    done
}

# serve_orders: executes the orders of the machine (host-orders.sh).
serve_orders() { beside sh "$here/host-orders.sh" "$ringfence" "$traffic" "$share"; }

# loopback_servers: servers at the host's loopback for the checks of `passt.sh`.
loopback_servers() {
    echo '0 0' >/proc/sys/net/ipv4/ping_group_range
    for version in 4 6; do
        beside "$traffic" receive 700$version >"$share/sent-$version"
    done
    beside "$traffic" echo 7003
    beside "$traffic" return 7005
    # A name server that knows one name.
    beside python3 -c '
import ipaddress, socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
while True:
    query, client = server.recvfrom(512)
    end = query.index(b"\0", 12) + 5
    kind = query[end - 3]
    address = {1: "192.0.2.80", 28: "2001:db8:1::80"}.get(kind)
    known = address and query[12:end - 5] == b"\x04host\x04test"
    data = ipaddress.ip_address(address).packed if known else b""
    answer = b"\xc0\x0c\0" + bytes([kind]) + b"\0\1\0\0\0\0\0" + bytes([len(data)]) + data if known else b""
    flags = b"\x81\x80" if known else b"\x81\x83"
    server.sendto(query[:2] + flags + b"\0\1\0" + bytes([bool(known)]) + b"\0\0\0\0" + query[12:end] + answer, client)
'
    # A stream from the host to a forwarded port of the machine.
    beside sh -c '
        until [ -e "$1/listens" ]; do sleep 0.1; done
        "$0" send 127.0.0.1 8080 24 && touch "$1/was-sent"
    ' "$traffic" "$share"
}
