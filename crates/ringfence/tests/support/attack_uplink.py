"""Attacks on an uplink, and the programs they are tried on: attack_uplink.py MODE ARG..."""
import os
import socket
import struct
import sys
import time

UPLINK_MAC = bytes.fromhex("027266005301")
GUEST_MAC = bytes.fromhex("027266005302")


def say(*words):
    """One write a line: lines of processes that share a pipe stay whole."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_over():
    return os.path.exists("stop")


def checksum(octets):
    octets += b"\0" * (len(octets) % 2)
    total = sum(struct.unpack(f"!{len(octets) // 2}H", octets))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def udp_echo(address, port):
    """Sends each datagram back from the address that it was sent to, and names its sender."""
    server = socket.socket(family(address), socket.SOCK_DGRAM)
    if family(address) == socket.AF_INET6:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
    server.bind((address, int(port)))
    say("listening")
    while True:
        octets, told, _, client = server.recvmsg(65536, 256)
        say("datagram", client[0], octets.decode())
        back = [(level, kind, data[:16] + bytes(4)) for level, kind, data in told]
        server.sendmsg([octets], back, 0, client)


def tagged(address, port, source, tag):
    """Sends its tag from one port again and again; counts replies with that tag, and any others."""
    client = socket.socket(family(address), socket.SOCK_DGRAM)
    client.bind(("", int(source)))
    client.connect((address, int(port)))
    client.settimeout(0.05)
    own = foreign = 0
    while own < 40 or not is_over():
        client.send(tag.encode())
        try:
            if client.recv(65536) == tag.encode():
                own += 1
            else:
                foreign += 1
        except OSError:
            pass
        if own == 10:
            say("heard")
        if own > 10:
            time.sleep(0.02)
    say("own", own >= 40, "foreign", foreign)


def reuse(port):
    """Whether a program of the host with SO_REUSEADDR and SO_REUSEPORT gets the port."""
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        client.bind(("0.0.0.0", int(port)))
        say("shared")
    except OSError as error:
        say("refused", error.errno)


def echo_request(kind, ident, number, payload):
    head = struct.pack("!BBHHH", kind, 0, 0, ident, number)
    total = checksum(head + payload)
    return struct.pack("!BBHHH", kind, 0, total, ident, number) + payload


def forge_replies(address, ident):
    """Echo replies that nobody asked this address for."""
    sender = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    while not is_over():
        sender.sendto(echo_request(0, int(ident), 1, b"forged"), (address, 0))
        time.sleep(0.01)


def ping(address, ident):
    """Sends echo requests; says what the replies carry."""
    sender = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    sender.settimeout(1)
    heard = set()
    for number in range(30):
        sender.sendto(echo_request(8, int(ident), number, b"honest"), (address, 0))
        end = time.time() + 0.1
        while time.time() < end:
            try:
                packet = sender.recv(2048)[20:]
            except TimeoutError:
                continue
            if packet[0] == 0:
                heard.add(packet[8:].decode())
    say("payloads", *sorted(heard))


def tries(*addresses):
    """TCP and UDP to port 7000 and 7001 of each address: which of them answers."""
    for address in addresses:
        reached = []
        try:
            socket.create_connection((address, 7000), 20).close()
            reached.append("tcp")
        except OSError:
            pass
        client = socket.socket(family(address), socket.SOCK_DGRAM)
        client.settimeout(2)
        for _ in range(4):
            try:
                client.connect((address, 7001))
                client.send(b"tried")
                client.recv(100)
                reached.append("udp")
                break
            except OSError:
                pass
        say("tried", address, "+".join(reached) or "nothing")


def frame(source, target, number, body):
    """An Ethernet frame with an IPv4 packet, whose transport checksum is at its place already."""
    ends = socket.inet_aton(source) + socket.inet_aton(target)
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 1, 0, 64, number, 0) + ends
    head = head[:10] + struct.pack("!H", checksum(head)) + head[12:]
    return UPLINK_MAC + GUEST_MAC + b"\x08\x00" + head + body


def raw(source, *targets):
    """SYNs and datagrams as frames, so that the guest's own kernel has no say."""
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    link.bind(("up0", 0))
    for number, target in enumerate(targets):
        ends = socket.inet_aton(source) + socket.inet_aton(target)
        port = 20000 + number
        text = f"raw-{target}".encode()
        for _ in range(3):
            syn = struct.pack("!HHIIBBHHH", port, 7000, 1, 0, 0x50, 2, 1000, 0, 0)
            total = checksum(ends + struct.pack("!HH", 6, len(syn)) + syn)
            link.send(frame(source, target, 6, syn[:16] + struct.pack("!H", total) + syn[18:]))
            udp = struct.pack("!HHHH", port, 7001, 8 + len(text), 0) + text
            link.send(frame(source, target, 17, udp))
            time.sleep(0.3)
    say("sent")


def idle(address, port):
    """A connection that is silent until the others are there; then its octets must come back."""
    line = socket.create_connection((address, int(port)), 10)
    line.settimeout(30)
    say("connected")
    while not os.path.exists("flooded"):
        time.sleep(0.05)
    try:
        line.sendall(b"alive\n")
        say("back", line.recv(100).decode().strip() or "end")
    except OSError as error:
        say("back", error)


def accept_all(address, port):
    server = socket.socket(family(address), socket.SOCK_STREAM)
    server.bind((address, int(port)))
    server.listen(4096)
    say("listening")
    held = []
    while True:
        held.append(server.accept())


def flood(address, port, count):
    """Many connections, all of which are kept."""
    held = []
    for _ in range(int(count)):
        try:
            held.append(socket.create_connection((address, int(port)), 10))
        except OSError as error:
            say("flood", error)
    time.sleep(1)
    say("flooded", len(held))
    open("flooded", "w").close()
    while not is_over():
        time.sleep(0.05)


def echo(address, port):
    """Sends back what comes, one connection after the other."""
    server = socket.socket(family(address), socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((address, int(port)))
    server.listen(64)
    say("listening")
    while True:
        line, client = server.accept()
        say("client", client[0])
        while octets := line.recv(1000):
            line.sendall(octets)
        line.close()


def greet(address, port):
    """Names each client, and hangs up."""
    server = socket.socket(family(address), socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1) if ":" in address else None
    server.bind((address, int(port)))
    server.listen(64)
    say("listening")
    while True:
        line, client = server.accept()
        say("client", client[0])
        line.close()


globals()[sys.argv[1]](*sys.argv[2:])
