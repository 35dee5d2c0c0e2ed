"""Hypervisor's and driver's end of a vhost-user network card, for `machine.py`.

The memory is a memfd with two virtqueues and their buffers. A buffer takes a whole super-packet. The card's frames have
a virtio-net header of 12 bytes, as those of a TAP with IFF_VNET_HDR.

With a pool, the memory has the mark of `ringfence-lent-pool` in its first page, and the messages are those of QEMU with
`iommu_platform=on`. Addresses of the hypervisor are others than those of descriptors.
"""
import array
import mmap
import os
import socket
import struct
import threading

SIZE = 64
BUFFER = 68 << 10
AREA = 1 << 20
BASE = 0x10000000
# Start of the same memory in the address space of the hypervisor.
USER = 0x7F0000000000
TOTAL = 16 << 20
MARK = b"ringfence-pool 1"
# CSUM, GUEST_CSUM, GUEST_TSO4/6, HOST_TSO4/6, VERSION_1, PROTOCOL_FEATURES
FEATURES = 1 << 0 | 1 << 1 | 1 << 7 | 1 << 8 | 1 << 11 | 1 << 12 | 1 << 32 | 1 << 30
GET_FEATURES, SET_FEATURES, SET_OWNER, SET_MEM_TABLE = 1, 2, 3, 5
SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE, SET_VRING_KICK, SET_VRING_CALL = 8, 9, 10, 12, 13
GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, SET_VRING_ENABLE, SET_BACKEND_REQ_FD = 15, 16, 18, 21
ACCESS_PLATFORM, REPLY_ACK, BACKEND_REQ = 1 << 33, 1 << 3, 1 << 5
WRITE = 2


class Queue:
    """Virtqueue whose descriptor n is buffer n. The tables begin at `start` of the memory."""

    def __init__(self, memory, start, flags):
        self.memory, self.start = memory, start
        # struct.pack_into clears its bytes first, and the device would see an index of 0.
        self.words = memoryview(memory).cast("H")
        self.avail, self.used = start + 0x1000, start + 0x2000
        self.kick, self.call = os.eventfd(0), os.eventfd(0)
        self.seen = 0
        for n in range(SIZE):
            struct.pack_into("<QIHH", memory, start + n * 16, BASE + self.buffer(n), BUFFER, flags, 0)

    def buffer(self, n):
        return self.start + AREA + n * BUFFER

    def load(self, at):
        return struct.unpack_from("<H", self.memory, at)[0]

    def post(self, n, length=BUFFER):
        """Makes a buffer available, and kicks the device unless it polls."""
        struct.pack_into("<I", self.memory, self.start + n * 16 + 8, length)
        index = self.load(self.avail + 2)
        struct.pack_into("<H", self.memory, self.avail + 4 + index % SIZE * 2, n)
        self.words[(self.avail + 2) // 2] = (index + 1) % 65536
        os.eventfd_write(self.kick, 1)

    def take(self):
        """Returns the next used buffer and its length, or None."""
        if self.load(self.used + 2) == self.seen:
            return None
        found = struct.unpack_from("<II", self.memory, self.used + 4 + self.seen % SIZE * 8)
        self.seen = (self.seen + 1) % 65536
        return found

    def wait(self):
        os.eventfd_read(self.call)


class Card:
    """Card on the socket `path`, whose frames are those of `tap`."""

    def __init__(self, path, tap, has_pool=False):
        self.tap = tap
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.file = os.memfd_create("memory")
        os.ftruncate(self.file, TOTAL)
        memory = mmap.mmap(self.file, TOTAL)
        if has_pool:
            memory[:len(MARK)] = MARK
        self.to_guest = Queue(memory, 0x1000, WRITE)
        self.from_guest = Queue(memory, TOTAL // 2, 0)
        self.set_up(has_pool)

    def send(self, request, payload=b"", file=None, flags=1):
        files = [] if file is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
        self.socket.sendmsg([struct.pack("=III", request, flags, len(payload)) + payload], files)

    def ask(self, request):
        self.send(request)
        return struct.unpack("=IIIQ", self.socket.recv(20))[3]

    def set_up_for_a_pool(self):
        """The messages of QEMU with `iommu_platform=on`, before SET_OWNER."""
        wanted = REPLY_ACK | BACKEND_REQ
        assert self.ask(GET_PROTOCOL_FEATURES) & wanted == wanted
        self.send(SET_PROTOCOL_FEATURES, struct.pack("=Q", wanted))
        self.requests, other = socket.socketpair()
        self.send(SET_BACKEND_REQ_FD, file=other.fileno(), flags=1 | 8)
        other.close()
        assert struct.unpack("=IIIQ", self.socket.recv(20))[3] == 0

    def set_up(self, has_pool):
        offered, wanted = self.ask(GET_FEATURES), FEATURES | (ACCESS_PLATFORM if has_pool else 0)
        assert offered & wanted == wanted, hex(offered)
        if has_pool:
            self.set_up_for_a_pool()
        self.send(SET_OWNER)
        # Without a vIOMMU, QEMU does not pass ACCESS_PLATFORM on.
        self.send(SET_FEATURES, struct.pack("=Q", FEATURES))
        table = struct.pack("=IIQQQQ", 1, 0, BASE, TOTAL, USER, 0)
        self.send(SET_MEM_TABLE, table, self.file)
        for n, queue in enumerate((self.to_guest, self.from_guest)):
            self.send(SET_VRING_NUM, struct.pack("=II", n, SIZE))
            self.send(SET_VRING_BASE, struct.pack("=II", n, 0))
            tables = [USER + at for at in (queue.start, queue.used, queue.avail)]
            self.send(SET_VRING_ADDR, struct.pack("=IIQQQQ", n, 0, *tables, 0))
            self.send(SET_VRING_KICK, struct.pack("=Q", n), queue.kick)
            self.send(SET_VRING_CALL, struct.pack("=Q", n), queue.call)
            self.send(SET_VRING_ENABLE, struct.pack("=II", n, 1))

    def run(self):
        for way in (self.frames_to_guest, self.frames_from_guest, self.end):
            threading.Thread(target=way, daemon=True).start()

    def frames_to_guest(self):
        queue = self.to_guest
        for n in range(SIZE):
            queue.post(n)
        while True:
            while (found := queue.take()) is not None:
                n, length = found
                try:
                    os.write(self.tap, queue.memory[queue.buffer(n):queue.buffer(n) + length])
                except OSError:
                    pass  # The interface is down.
                queue.post(n)
            queue.wait()

    def frames_from_guest(self):
        queue, free = self.from_guest, list(range(SIZE))
        while True:
            frame = os.read(self.tap, BUFFER)
            while (found := queue.take()) is not None:
                free.append(found[0])
            while not free:
                queue.wait()
                while (found := queue.take()) is not None:
                    free.append(found[0])
            n = free.pop()
            queue.memory[queue.buffer(n):queue.buffer(n) + len(frame)] = frame
            queue.post(n, len(frame))

    def end(self):
        try:
            self.socket.recv(1)
        except OSError:
            pass
        os.write(1, b"unplugged\n")
