"""Services that find each other by multicast: mDNS (RFC 6762) and SSDP (UPnP), each with a server and a client.

    multicast.py serve INTERFACE NAME            answers questions for NAME in all groups, until it is ended
    multicast.py ask INTERFACE NAME SECONDS      asks for NAME in all groups; prints a line for each answer

A question of mDNS from port 5353 is answered to the group, all others to their sender alone.
"""

import os
import select
import socket
import struct
import sys
import time

GROUPS = [
    ("mdns", "224.0.0.251", 5353),
    ("mdns", "ff02::fb", 5353),
    ("ssdp", "239.255.255.250", 1900),
    ("ssdp", "ff02::c", 1900),
    ("ssdp", "ff05::c", 1900),
]


def say(*words):
    """Prints a line by one call, because service and client of a guest share their output."""
    os.write(1, (" ".join(words) + "\n").encode())


def question(service, name):
    if service == "mdns":
        return struct.pack("!6H", 0, 0, 1, 0, 0, 0) + encoded(name) + struct.pack("!2H", 1, 1)
    return (
        f"M-SEARCH * HTTP/1.1\r\nHOST: 239.255.255.250:1900\r\nMAN: \"ssdp:discover\"\r\nMX: 1\r\nST: {name}\r\n\r\n"
    ).encode()


def answer(service, name):
    if service == "mdns":
        record = encoded(name) + struct.pack("!2HIH", 1, 0x8001, 120, 4) + bytes([192, 0, 2, 77])
        return struct.pack("!6H", 0, 0x8400, 0, 1, 0, 0) + record
    return f"HTTP/1.1 200 OK\r\nST: {name}\r\nUSN: uuid:{name}\r\n\r\n".encode()


def encoded(name):
    labels = [name, "local"]
    return b"".join(bytes([len(label)]) + label.encode() for label in labels) + b"\0"


def index_of(interface):
    return socket.if_nametoindex(interface)


def sender(group, interface, port):
    """Returns a socket that sends to a group from `port`, or from any one if that is 0."""
    is_v4 = "." in group
    made = socket.socket(socket.AF_INET if is_v4 else socket.AF_INET6, socket.SOCK_DGRAM)
    if port:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if is_v4:
        request = struct.pack("=4s4si", bytes(4), bytes(4), index_of(interface))
        made.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, request)
        made.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
    else:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index_of(interface))
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
    made.bind(("" if is_v4 else "::", port))
    return made


def member(group, interface, port):
    """Returns a socket that receives what is sent to a group, and sends from its port."""
    made = sender(group, interface, port)
    if "." in group:
        request = struct.pack("=4s4si", socket.inet_aton(group), bytes(4), index_of(interface))
        made.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, request)
    else:
        request = socket.inet_pton(socket.AF_INET6, group) + struct.pack("=I", index_of(interface))
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, request)
    return made


def serve(interface, name):
    groups = {member(group, interface, port): (service, group, port) for service, group, port in GROUPS}
    say("serves")
    while True:
        for ready in select.select(groups, [], [])[0]:
            service, group, port = groups[ready]
            received, client = ready.recvfrom(2048)
            if received != question(service, name):
                continue
            say("asked by", service, group, client[0].split("%")[0])
            is_peer = service == "mdns" and client[1] == port
            ready.sendto(answer(service, name), (group, port) if is_peer else client)


def ask(interface, name, seconds):
    open_questions = {}
    for service, group, port in GROUPS:
        open_questions[sender(group, interface, 0)] = (service, group, port, "alone")
        if service == "mdns":
            open_questions[member(group, interface, port)] = (service, group, port, "group")
    end = time.monotonic() + float(seconds)
    while open_questions and time.monotonic() < end:
        for asking, (service, group, port, _) in open_questions.items():
            try:
                asking.sendto(question(service, name), (group, port))
            except OSError as error:
                # An address of IPv6 may not be usable yet.
                print("cannot send to", group, error, file=sys.stderr)
        until = min(end, time.monotonic() + 0.5)
        while open_questions and time.monotonic() < until:
            for ready in select.select(open_questions, [], [], 0.1)[0]:
                received, server = ready.recvfrom(2048)
                service, group, port, how = open_questions[ready]
                if received == answer(service, name):
                    say("answer", service, group, how, server[0].split("%")[0])
                    del open_questions[ready]
    for service, group, port, how in open_questions.values():
        say("silence", service, group, how)


if __name__ == "__main__":
    {"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:])
