"""Name server that lies, for the tests of egress policies: liar.py ADDRESS REAL OTHER

It answers each query for type A with REAL, and puts OTHER into the authority and additional sections, for the name that
was asked for and for `b.test`. The first label `ttlN` sets the time to live. It prints each name that it is asked for.
"""

import ipaddress
import socket
import struct
import sys


def name(text):
    return b"".join(bytes([len(label)]) + label.encode() for label in text.split(".")) + b"\0"


def record(owner, ttl, address):
    return owner + struct.pack(">HHIH", 1, 1, ttl, 4) + ipaddress.ip_address(address).packed


def main(address, real, other):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        print("listening", flush=True)
        while True:
            query, client = server.recvfrom(4096)
            end = query.index(b"\0", 12) + 5
            question, labels, at = query[12:end], [], 12
            while query[at]:
                labels.append(query[at + 1:at + 1 + query[at]].decode())
                at += 1 + query[at]
            print("asked", ".".join(labels), flush=True)
            ttl = int(labels[0][3:]) if labels[0].startswith("ttl") else 300
            asked = b"\xc0\x0c"
            answers = [record(asked, ttl, real)] if question[-4:-2] == b"\0\1" else []
            lies = [record(asked, ttl, other), record(name("b.test"), ttl, other)]
            counts = struct.pack(">HHHHH", 0x8580, 1, len(answers), 2, 2)
            server.sendto(query[:2] + counts + question + b"".join(answers + lies + lies), client)


main(*sys.argv[1:])
