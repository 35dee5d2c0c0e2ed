"""Random attacker, run as the command of a guest: frames, disk sockets, control sockets, files.

Usage: attacker.py SEED SECONDS FAMILY[,FAMILY...]

Families: frames, spoof, nbd, control, files, uplink. One thread a family. Every failure of a deed is
expected and ignored; the honest guests next door are the judges.
"""

import fcntl
import glob
import json
import os
import random
import select
import socket
import struct
import sys
import threading
import time

SEED, SECONDS, FAMILIES = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3].split(",")
UNTIL = time.monotonic() + SECONDS
COUNTS = {}


def running():
    return time.monotonic() < UNTIL


def count(name):
    COUNTS[name] = COUNTS.get(name, 0) + 1


# Descriptors of all kinds


def lingering_tcp():
    """TCP socket whose close blocks: SO_LINGER of an hour and a peer that reads nothing."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    sender = socket.create_connection(listener.getsockname())
    peer, _ = listener.accept()
    KEPT.append(peer)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    sender.setblocking(False)
    try:
        while True:
            sender.send(bytes(65536))
    except OSError:
        pass
    return sender.detach()


def carrier():
    """Unix socket in whose queue lies another descriptor whose close blocks."""
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inner = lingering_tcp()
    socket.send_fds(a, [b"x"], [inner, b.fileno()])
    os.close(inner)
    KEPT.append(a)
    return b.detach()


def sealed_memfd():
    fd = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096 * random.choice([1, 16, 1024]))
    fcntl.fcntl(fd, 1033, random.choice([0, 2, 4, 6, 7, 15]))
    return fd


def full_pipe():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(65536))
    except OSError:
        pass
    KEPT_FDS.append(reader)
    return writer


def user_namespace():
    return os.open("/proc/self/ns/user", os.O_RDONLY)


def path_only():
    return os.open("/", os.O_PATH)


def device():
    name = random.choice(["null", "zero", "full", "random", "net/tun", "fuse", "ptmx", "tty"])
    return os.open("/dev/" + name, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY)


def epoll():
    poller = select.epoll()
    reader, writer = os.pipe()
    poller.register(reader, select.EPOLLIN)
    KEPT_FDS.extend([reader, writer])
    duplicate = os.dup(poller.fileno())
    poller.close()
    return duplicate


KINDS = [
    lingering_tcp,
    carrier,
    sealed_memfd,
    full_pipe,
    user_namespace,
    path_only,
    device,
    epoll,
    lambda: os.pidfd_open(os.getpid()),
    lambda: os.open("/", os.O_RDONLY | os.O_DIRECTORY),
    lambda: os.memfd_create("plain"),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach(),
    lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).detach(),
    lambda: socket.socketpair()[0].detach(),
    lambda: os.open(sys.argv[0], os.O_RDONLY),
]
KEPT, KEPT_FDS = [], []


def descriptors(rng, most):
    fds = []
    for _ in range(rng.choice([0, 1, 1, 2, 3, most])):
        try:
            fds.append(rng.choice(KINDS)())
        except OSError:
            pass
    return fds


def forget(fds):
    for fd in fds:
        closing = threading.Thread(target=os.close, args=(fd,), daemon=True)
        closing.start()
    while len(KEPT) > 40:
        KEPT.pop(0).close()
    while len(KEPT_FDS) > 40:
        os.close(KEPT_FDS.pop(0))


def send(sock, payload, rng, most=8):
    fds = descriptors(rng, most)
    try:
        socket.send_fds(sock, [payload], fds, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        count("descriptors sent") if fds else None
    finally:
        forget(fds)


# Families


def checksum(data):
    data += b"\0" * (len(data) & 1)
    total = sum(struct.unpack("!%dH" % (len(data) // 2), data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def interfaces():
    return [name for name in os.listdir("/sys/class/net") if name != "lo"]


def packet_socket(name):
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    sock.bind((name, 0))
    sock.setblocking(False)
    return sock


def random_frame(rng):
    destination = rng.choice([b"\xff" * 6, b"\x33\x33\0\0\0\x01", rng.randbytes(6)])
    kind = rng.choice([0x0800, 0x86DD, 0x0806, 0x8100, 0x88A8, rng.randrange(65536)])
    body = rng.randbytes(rng.randrange(0, 1500))
    if kind == 0x0800 and rng.randrange(2):
        total = rng.choice([len(body) + 20, rng.randrange(65536)])
        protocol = rng.choice([1, 2, 6, 17, rng.randrange(256)])
        flags = rng.choice([0, 0x2000, 0x4000, rng.randrange(65536)])
        header = struct.pack("!BBHHHBBH", rng.choice([0x45, 0x4F, 0x40]), 0, total & 0xFFFF,
                             rng.randrange(65536), flags, 64, protocol, 0)
        header += rng.randbytes(4) + rng.choice([b"\xff" * 4, rng.randbytes(4)])
        body = header + body
    if kind == 0x86DD and rng.randrange(2):
        body = struct.pack("!IHBB", 6 << 28, len(body) & 0xFFFF,
                           rng.choice([0, 6, 17, 43, 44, 58, 59, rng.randrange(256)]), 255)
        body += rng.randbytes(32) + rng.randbytes(rng.randrange(200))
    return destination + rng.choice([rng.randbytes(6), b"\xff" * 6]) + struct.pack("!H", kind) + body


def frames(rng):
    sockets = [packet_socket(name) for name in interfaces()]
    while running():
        for sock in sockets:
            try:
                sock.send(random_frame(rng)[: rng.choice([14, 60, 1514])])
                count("frames")
            except OSError:
                time.sleep(0.001)
        time.sleep(rng.choice([0, 0, 0.0005]))


def neighbours():
    """IPv4 addresses of the other guests, from the names that the orchestrator passes."""
    found = []
    for name in ("honest-a", "honest-b"):
        try:
            found += [info[4][0] for info in socket.getaddrinfo(name, None, socket.AF_INET)]
        except OSError:
            pass
    return [socket.inet_aton(address) for address in found]


def own_mac(name):
    text = open("/sys/class/net/%s/address" % name).read().strip()
    return bytes.fromhex(text.replace(":", ""))


def router_advertisement(mac, rng):
    source = bytes.fromhex("fe80" + "00" * 6) + rng.randbytes(8)
    target = bytes.fromhex("ff02" + "00" * 13 + "01")
    option = struct.pack("!BBBBIII", 3, 4, 64, 0xC0, 1800, 1800, 0) + rng.randbytes(8) + bytes(8)
    message = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0) + option + b"\x01\x01" + mac
    pseudo = source + target + struct.pack("!II", len(message), 58)
    message = message[:2] + struct.pack("!H", checksum(pseudo + message)) + message[4:]
    header = struct.pack("!IHBB", 6 << 28, len(message), 58, 255) + source + target
    return b"\x33\x33\0\0\0\x01" + mac + b"\x86\xdd" + header + message


def gratuitous_arp(mac, address, rng):
    arp = struct.pack("!HHBBH", 1, 0x0800, 6, 4, rng.choice([1, 2]))
    body = b"\x08\x06" + arp + mac + address + b"\xff" * 6 + address
    tag = rng.choice([b"", struct.pack("!HH", 0x8100, 0)])
    return b"\xff" * 6 + mac + tag + body


def dhcp_offer(mac, rng):
    options = b"\x63\x82\x53\x63\x35\x01\x02\x36\x04" + rng.randbytes(4) + b"\xff"
    body = struct.pack("!BBBBI", 2, 1, 6, 0, rng.randrange(1 << 32)) + rng.randbytes(228) + options
    udp = struct.pack("!HHHH", 67, 68, len(body) + 8, 0) + body
    header = struct.pack("!BBHHHBBH", 0x45, 0, len(udp) + 20, 0, 0, 64, 17, 0)
    header += rng.randbytes(4) + b"\xff" * 4
    header = header[:10] + struct.pack("!H", checksum(header)) + header[12:]
    return b"\xff" * 6 + mac + b"\x08\x00" + header + udp


def spoof(rng):
    if "eth0" not in interfaces():
        return
    sock, mac, addresses = packet_socket("eth0"), own_mac("eth0"), neighbours()
    while running():
        deeds = [lambda: router_advertisement(mac, rng), lambda: dhcp_offer(mac, rng)]
        for address in addresses:
            deeds.append(lambda address=address: gratuitous_arp(mac, address, rng))
        try:
            sock.send(rng.choice(deeds)())
            count("spoofed")
        except OSError:
            pass
        time.sleep(0.002)


def unix(path, kind):
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.settimeout(0.5)
    sock.connect(path)
    return sock


def nbd(rng):
    path = os.environ.get("RINGFENCE_DISK0")
    held = []
    while path and running():
        try:
            sock = unix(path, socket.SOCK_STREAM)
            held.append(sock)
            send(sock, struct.pack("!I", rng.choice([1, 3, 0])), rng)
            for _ in range(rng.randrange(4)):
                option = rng.choice([1, 2, 3, 5, 6, 7, 8, rng.randrange(1 << 32)])
                data = rng.randbytes(rng.randrange(64))
                length = rng.choice([len(data), rng.randrange(1 << 32)])
                send(sock, b"IHAVEOPT" + struct.pack("!II", option, length) + data, rng)
            if rng.randrange(2):
                send(sock, b"IHAVEOPT" + struct.pack("!IIIH", 7, 6, 0, 0), rng)
            for _ in range(rng.randrange(64)):
                command = rng.choice([0, 1, 2, 3, 4, 6, 7, rng.randrange(65536)])
                request = struct.pack("!IHHQQI", 0x25609513, rng.randrange(1 << 16), command,
                                      rng.randrange(1 << 64), rng.choice([0, 512, 1 << 63, 4096]),
                                      rng.choice([0, 512, 4096, 1 << 20, (1 << 32) - 1]))
                send(sock, request + rng.randbytes(rng.choice([0, 512])), rng, 1)
            count("nbd sessions")
        except OSError:
            time.sleep(0.005)
        while len(held) > rng.choice([0, 4, 64]):
            held.pop(rng.randrange(len(held))).close()


def control_messages(rng):
    attach = {"Attach": {"version": "0", "name": "honest-a", "addresses": [], "mtu": 1500,
                         "mode": "copy", "queues": 1, "offloads": "", "coalesce": False}}
    return rng.choice([
        b'"Stats"', json.dumps(attach).encode(), rng.randbytes(rng.randrange(200)),
        b"[" * rng.choice([1, 100, 20000]), b'{"Dialled":{"handle":0,"problem":null}}',
        b'{"HostLeg":{"name":"x","offloads":0,"mtu":1500}}', b"",
    ])


def control(rng):
    places = [os.environ.get("XDG_RUNTIME_DIR", "/nonexistent"), "/run/ringfence"]
    held = []
    while running():
        paths = [p for place in places for p in glob.glob(place + "/ringfence/*")]
        paths += [p for p in glob.glob("/run/ringfence/*")]
        if not paths:
            count("no control socket in sight")
            time.sleep(0.2)
            continue
        try:
            sock = unix(rng.choice(paths), rng.choice([socket.SOCK_SEQPACKET, socket.SOCK_STREAM]))
            held.append(sock)
            for _ in range(rng.choice([1, 5, 2000])):
                send(sock, control_messages(rng), rng, 64) if rng.randrange(8) == 0 else sock.send(
                    control_messages(rng), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            count("control sessions")
        except OSError:
            time.sleep(0.002)
        while len(held) > rng.choice([0, 8, 100]):
            held.pop(rng.randrange(len(held))).close()


def files(rng):
    place = os.environ.get("XDG_RUNTIME_DIR", "/nonexistent") + "/ringfence"
    while running():
        try:
            fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            count("runtime directory locked")
            time.sleep(0.5)
            os.close(fd)
        except OSError:
            pass
        for path in glob.glob(place + "/*"):
            try:
                os.unlink(path)
                count("sockets unlinked")
            except OSError:
                pass
        time.sleep(0.1)


def uplink(rng):
    held = []
    while running():
        host = rng.choice(["192.0.2.1", "198.51.100.1", "192.0.2.2", "127.0.0.1", "169.254.169.254"])
        try:
            sock = socket.socket(socket.AF_INET, rng.choice([socket.SOCK_STREAM, socket.SOCK_DGRAM]))
            sock.setblocking(False)
            held.append(sock)
            sock.connect_ex((host, rng.choice([7, 53, 80, 9000, rng.randrange(1, 65536)])))
            sock.send(rng.randbytes(rng.choice([1, 100, 1400])))
            count("flows")
        except OSError:
            pass
        while len(held) > rng.choice([16, 256]):
            held.pop(rng.randrange(len(held))).close()
        time.sleep(0.0005)


def guarded(family, rng):
    try:
        family(rng)
    except Exception as error:  # A deed that the machine does not allow is none.
        print("%s: %r" % (family.__name__, error), file=sys.stderr, flush=True)


def main():
    os.system("ip link set lo up 2>/dev/null")
    random.seed(SEED)
    known = {f.__name__: f for f in (frames, spoof, nbd, control, files, uplink)}
    threads = []
    for number, name in enumerate(FAMILIES):
        if name in known:
            rng = random.Random(SEED * 31 + number)
            thread = threading.Thread(target=guarded, args=(known[name], rng), daemon=True)
            thread.start()
            threads.append(thread)
    while running():
        time.sleep(0.1)
    print("DEEDS " + json.dumps(COUNTS), flush=True)
    # Threads that close a descriptor may take an hour: they end with the process.
    os._exit(0)


main()
