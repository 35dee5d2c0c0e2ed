"""A virtual machine without a processor: machine.py ATTACH SCRIPT ARGUMENT...

A TAP in a new network namespace is the machine's network card. Its frames go over a stream socket, each behind its
length, as QEMU's do. The script then runs in that namespace, so the machine's network is the kernel's. ATTACH is the
path of a socket, or `fd:PROGRAM`, which is started with a connected socket as --fd 5 and has to exit with 0, or
`vhost-user:PATH`: the frames then pass virtqueues in the machine's memory (`vhost_user.py`), with the kernel's offloads. With `vhost-user-pool:PATH` that memory is a pool.
`vfkit:PATH` is a datagram socket with one frame each, which begins as vfkit does.
"""
import fcntl
import os
import socket
import struct
import subprocess
import sys
import threading
import time

TUNSETIFF = 0x400454CA
TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454D0, 0x400454D8
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
# Checksums, and super-packets of TCP over IPv4 and IPv6.
OFFLOADS = 1 | 2 | 4
MAC = "52:54:00:12:34:56"


def attach(where):
    if where.startswith("fd:"):
        own, other = socket.socketpair()
        os.dup2(other.fileno(), 5)
        other.close()
        words = where[3:].split() + ["--fd", "5"]
        subprocess.run(words, pass_fds=[5], check=True)
        os.close(5)
        return own
    is_vfkit, where = where.startswith("vfkit:"), where.removeprefix("vfkit:")
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM if is_vfkit else socket.SOCK_STREAM)
    if is_vfkit:
        own = os.path.abspath(where) + ".client"
        if os.path.exists(own):
            os.unlink(own)
        stream.bind(own)
        # The server may run as another user.
        os.chmod(own, 0o777)
    for _ in range(600):
        try:
            stream.connect(where)
            if is_vfkit:
                stream.send(b"VFKT")
            return stream
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"nobody listens at {where}")


def receive(stream, length):
    parts = b""
    while len(parts) < length:
        part = stream.recv(length - len(parts))
        if not part:
            raise EOFError
        parts += part
    return parts


def to_card(stream, tap):
    try:
        while True:
            if stream.type == socket.SOCK_DGRAM:
                os.write(tap, stream.recv(70000))
                continue
            (length,) = struct.unpack(">I", receive(stream, 4))
            os.write(tap, receive(stream, length))
    except (EOFError, ConnectionError):
        os.write(1, b"unplugged\n")


def from_card(stream, tap):
    try:
        while True:
            frame = os.read(tap, 70000)
            if stream.type == socket.SOCK_DGRAM:
                stream.send(frame)
            else:
                stream.sendall(struct.pack(">I", len(frame)) + frame)
    except OSError:
        pass


kind, _, where = sys.argv[1].partition(":")
if not kind.startswith("attached"):
    if kind.startswith("vhost-user"):
        attached = f"attached-{kind}:{where}"
    else:
        stream = attach(sys.argv[1])
        os.set_inheritable(stream.fileno(), True)
        attached = f"attached:{stream.fileno()}"
    os.execvp("unshare", ["unshare", "--net", sys.executable, __file__, attached, *sys.argv[2:]])
has_header = kind.startswith("attached-vhost-user")
tap = os.open("/dev/net/tun", os.O_RDWR)
flags = IFF_TAP | IFF_NO_PI | (IFF_VNET_HDR if has_header else 0)
fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", b"eth0", flags))
if has_header:
    fcntl.ioctl(tap, TUNSETVNETHDRSZ, struct.pack("i", 12))
    fcntl.ioctl(tap, TUNSETOFFLOAD, OFFLOADS)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run(["ip", "link", "set", "eth0", "address", MAC], check=True)
if has_header:
    import vhost_user

    vhost_user.Card(where, tap, kind.endswith("-pool")).run()
else:
    stream = socket.socket(fileno=int(where))
    os.set_inheritable(stream.fileno(), False)
    for way in (to_card, from_card):
        threading.Thread(target=way, args=(stream, tap), daemon=True).start()
ended = subprocess.run(["sh", "-ec"] + sys.argv[2:])
# The last thing that the machine does: its end of the socket is closed with the process.
sys.exit(ended.returncode)
