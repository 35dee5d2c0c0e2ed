"""A path between two network namespaces that delays, loses, reorders and repeats frames: two TAPs, and this program between them.

path.py NETNS NEAR FAR    makes the interface NEAR here and FAR in the network namespace of the file NETNS, prints `ready`, and
                          carries frames as the file `path` says, which it reads again ten times a second: a JSON object of
                          delay and jitter (ms), loss and repeat (shares), up
"""

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP_NO_PI = 0x1002
FRAME = 1 << 16
# A queue beyond this is a full router: later frames are lost.
WAITING = 5000
AGAIN = 0.1


def tap(name):
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP_NO_PI))
    return file


def enter(netns):
    file = os.open(netns, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, 0x40000000):
        raise OSError(ctypes.get_errno(), "setns")


def settings():
    try:
        with open("path") as file:
            return json.load(file)
    except (OSError, ValueError):
        # It is being written.
        return None


def main():
    near = tap(sys.argv[2])
    enter(sys.argv[1])
    ends = [near, tap(sys.argv[3])]
    print("ready", flush=True)
    now, read_at, order, waiting = {}, 0.0, itertools.count(), []
    while True:
        clock = time.monotonic()
        if clock >= read_at:
            now, read_at = settings() or now, clock + AGAIN
        until = min(read_at, waiting[0][0] if waiting else read_at)
        for file in select.select(ends, [], [], max(0.0, until - clock))[0]:
            other = ends[1 - ends.index(file)]
            for _ in range(64):
                try:
                    frame = os.read(file, FRAME)
                except BlockingIOError:
                    break
                copies = 1 + (random.random() < now.get("repeat", 0))
                if not now.get("up", True) or random.random() < now.get("loss", 0) or len(waiting) > WAITING:
                    continue
                for _ in range(copies):
                    due = time.monotonic() + (now.get("delay", 0) + random.random() * now.get("jitter", 0)) / 1000
                    heapq.heappush(waiting, (due, next(order), other, frame))
        clock = time.monotonic()
        while waiting and waiting[0][0] <= clock:
            _, _, file, frame = heapq.heappop(waiting)
            try:
                os.write(file, frame)
            except OSError:
                # The interface is down, or full.
                pass


main()
