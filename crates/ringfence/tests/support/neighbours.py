"""Frames by which a guest impersonates its neighbours, and a guest that notes which of them arrive.

neighbours.py attack OWN4 OWN6 OTHER4 OTHER6 DONE   sends each frame, then all of ENDS until the file DONE exists
neighbours.py reach IP...                           ends well if each of these hosts answers
neighbours.py listen DONE                           prints the marks of all frames that arrive up to the last of ENDS

Each frame ends with a mark, `MARK:name;`, behind the packet or in its payload.
"""

import os
import re
import socket
import struct
import sys
import time

EVERYBODY = b"\xff" * 6
ALL_NODES = bytes.fromhex("333300000001")
ALL_NODES_IP = socket.inet_pton(socket.AF_INET6, "ff02::1")
FOREIGN_MAC = bytes.fromhex("020000000099")

# A guest keeps the order of frames only in a queue, and chooses the queue by flow: each queue has one of these flows.
ENDS = {f"end-{port}": port for port in range(1, 33)}


def raw():
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    link.bind(("eth0", 0))
    return link


def checksum(data):
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ipv4(source, target, protocol, payload, fragment=0):
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(payload), 7, fragment, 64, protocol, 0, source, target)
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + payload


def ipv6(source, target, number, payload):
    return struct.pack("!IHBB16s16s", 6 << 28, len(payload), number, 255, source, target) + payload


def summed(source, target, number, payload, at):
    pseudo = source + target + struct.pack("!II", len(payload), number)
    return payload[:at] + struct.pack("!H", checksum(pseudo + payload)) + payload[at + 2 :]


def icmpv6(source, target, message):
    return summed(source, target, 58, message, 2)


def udp(source, target, payload):
    return struct.pack("!HHHH", source, target, 8 + len(payload), 0) + payload


def arp(operation, mac, sender, target):
    return struct.pack("!HHBBH6s4s6s4s", 1, 0x0800, 6, 4, operation, mac, sender, b"\0" * 6, target)


def frames(mac, own4, own6, other4, other6):
    local = b"\xfe\x80" + b"\0" * 6 + bytes([mac[0] ^ 2]) + mac[1:3] + b"\xff\xfe" + mac[3:]
    none4, none6 = b"\0" * 4, b"\0" * 16
    everybody4 = b"\xff" * 4

    def ethernet(kind, packet, to=EVERYBODY, sender=mac):
        return to + sender + struct.pack("!H", kind) + packet

    def six(packet):
        return ethernet(0x86DD, packet, ALL_NODES)

    def neighbour(source, kind, flags, target, option, option_mac):
        message = struct.pack("!BBHI16sBB6s", kind, 0, 0, flags, target, option, 1, option_mac)
        return six(ipv6(source, ALL_NODES_IP, 58, icmpv6(source, ALL_NODES_IP, message)))

    prefix = struct.pack("!BBBBIII16s", 3, 4, 64, 0xC0, 1800, 1800, 0, bytes.fromhex("fd99") + b"\0" * 14)
    message = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0) + prefix + b"\1\1" + mac
    message = icmpv6(local, ALL_NODES_IP, message)
    advertisement = ipv6(local, ALL_NODES_IP, 58, message)
    tag = struct.pack("!HH", 0, 0x8100)

    def part(number, field, body):
        return six(ipv6(local, ALL_NODES_IP, 44, struct.pack("!BBHI", number, 0, field, 9) + body))

    yield "arp-reply", ethernet(0x0806, arp(2, mac, other4, other4))
    yield "arp-gratuitous", ethernet(0x0806, arp(1, mac, other4, other4))
    yield "arp-hardware", ethernet(0x0806, arp(2, FOREIGN_MAC, own4, own4))
    yield "arp-probe", ethernet(0x0806, arp(1, mac, none4, other4))
    yield "arp-vlan", ethernet(0x8100, b"\0\0\x08\x06" + arp(2, mac, other4, other4))
    yield "na-override", neighbour(local, 136, 0x20000000, other6, 2, mac)
    yield "na-lladdr", neighbour(local, 136, 0x20000000, own6, 2, FOREIGN_MAC)
    yield "ns-source", neighbour(other6, 135, 0, own6, 1, mac)
    yield "ns-lladdr", neighbour(own6, 135, 0, other6, 1, FOREIGN_MAC)
    yield "ns-dad", neighbour(none6, 135, 0, other6, 14, b"123456")
    yield "ra", six(advertisement)
    yield "ra-vlan", ethernet(0x8100, b"\0\0\x86\xdd" + advertisement, ALL_NODES)
    yield "ra-qinq", ethernet(0x88A8, tag + b"\0\0\x86\xdd" + advertisement, ALL_NODES)
    yield "ra-stacked", ethernet(0x8100, tag + tag + b"\0\0\x86\xdd" + advertisement, ALL_NODES)
    options = struct.pack("!BBBBI", 60, 0, 1, 4, 0) + struct.pack("!BBBBI", 58, 0, 1, 4, 0)
    yield "ra-options", six(ipv6(local, ALL_NODES_IP, 0, options + message))
    yield "ra-atomic", part(58, 0, message)
    yield "ra-part", part(58, 1, message[:16])
    yield "ra-chain", part(60, 1, struct.pack("!BBBBI", 58, 0, 1, 4, 0))
    redirect = struct.pack("!BBHI16s16sBB6s", 137, 0, 0, 0, other6, other6, 2, 1, mac)
    yield "redirect6", six(ipv6(local, ALL_NODES_IP, 58, icmpv6(local, ALL_NODES_IP, redirect)))
    yield "redirect4", ethernet(0x0800, ipv4(own4, everybody4, 1, b"\5\1" + b"\0" * 2 + other4 + b"\x45" * 28))
    for name, source in ("udp4", other4), ("udp4-none", none4):
        yield name, ethernet(0x0800, ipv4(source, everybody4, 17, udp(9, 9, b"x")))
    yield "udp4-vlan", ethernet(0x8100, b"\0\0\x08\x00" + ipv4(other4, everybody4, 17, udp(9, 9, b"x")))
    yield "udp4-part", ethernet(0x0800, ipv4(other4, everybody4, 17, udp(9, 9, b"x" * 8), 0x2000))
    yield "udp4-later-part", ethernet(0x0800, ipv4(other4, everybody4, 17, b"x" * 16, 4))
    yield "tcp4", ethernet(0x0800, ipv4(other4, everybody4, 6, b"\0" * 12 + b"\x50\4" + b"\0" * 6))
    yield "icmp4", ethernet(0x0800, ipv4(other4, everybody4, 1, b"\x08" + b"\0" * 7))
    for name, source in ("udp6", other6), ("udp6-none", none6), ("udp6-local", local[:15] + b"\x99"):
        yield name, six(ipv6(source, ALL_NODES_IP, 17, summed(source, ALL_NODES_IP, 17, udp(9, 9, b"x"), 6)))
    yield "dhcp4", ethernet(0x0800, ipv4(own4, everybody4, 17, udp(67, 68, b"\2" + b"\0" * 240)))
    yield "dhcp4-port", ethernet(0x0800, ipv4(own4, everybody4, 17, udp(9, 68, b"\2" + b"\0" * 240)))
    yield "dhcp4-part", ethernet(0x0800, ipv4(own4, everybody4, 17, udp(67, 68, b"\2" * 8), 0x2000))
    yield "dhcp6", six(ipv6(local, ALL_NODES_IP, 17, summed(local, ALL_NODES_IP, 17, udp(547, 546, b"x"), 6)))
    yield "mac", ethernet(0x0800, ipv4(own4, everybody4, 17, udp(9, 9, b"x")), sender=FOREIGN_MAC)
    yield "llc", ethernet(46, b"\xaa\xaa\3\0\0\0\x08\0" + b"\0" * 38)
    yield "pppoe", ethernet(0x8863, b"\x11\7\0\0\0\0")


def own_frame(mac, own4, name, port):
    packet = ipv4(own4, b"\xff" * 4, 17, udp(port, 9, b"own"))
    return EVERYBODY + mac + b"\x08\0" + packet + f"MARK:{name};".encode()


def super_packet(mac, source, name):
    """A TCP super-packet, to be sent behind a virtio-net header."""
    payload = b"x" * 6000 + f"MARK:{name};".encode()
    tcp = b"\0\x09\0\x09" + b"\0" * 8 + b"\x50\x10" + b"\xff\xff" + b"\0" * 4
    header = struct.pack("=BBHHHH", 1, 1, 54, 1400, 34, 16)
    return header + EVERYBODY + mac + b"\x08\0" + ipv4(source, b"\xff" * 4, 6, tcp + payload)


def attack(own4, own6, other4, other6, done):
    link = raw()
    mac = link.getsockname()[4]
    own4, other4 = socket.inet_aton(own4), socket.inet_aton(other4)
    own6, other6 = (socket.inet_pton(socket.AF_INET6, ip) for ip in (own6, other6))
    sent = []
    for name, frame in frames(mac, own4, own6, other4, other6):
        for _ in range(3):
            link.send(frame + f"MARK:{name};".encode())
        sent.append(name)
    large = raw()
    large.setsockopt(263, 15, 1)  # SOL_PACKET, PACKET_VNET_HDR
    large.send(super_packet(mac, other4, "super-packet"))
    large.send(super_packet(mac, own4, "own-super-packet"))
    print("sent:", *sent, "super-packet", flush=True)
    for _ in range(600):
        for name, port in ENDS.items():
            link.send(own_frame(mac, own4, name, port))
        if os.path.exists(done):
            return
        time.sleep(0.05)
    sys.exit("nobody heard of the end")


def listen(done):
    link = raw()
    link.settimeout(60)
    print("listening", flush=True)
    arrived = set()
    while not ENDS.keys() <= arrived:
        marks = re.findall(rb"MARK:([a-z0-9-]+);", link.recv(1 << 17))
        arrived.update(mark.decode() for mark in marks)
    open(done, "w").close()
    print("arrived:", *sorted(arrived - ENDS.keys()), flush=True)


def reach(*addresses):
    for address in addresses:
        try:
            socket.create_connection((address, 9), timeout=30).close()
        except ConnectionRefusedError:
            pass  # The host answers that nobody listens there.


{"attack": attack, "listen": listen, "reach": reach}[sys.argv[1]](*sys.argv[2:])
