#!/usr/bin/env python3
"""Monitor of a QEMU. As a program, plugs a disk in, or out:

monitor.py plug NAME [OPTION=VALUE...]     the disk on the socket /dev/shm/NAME.socket, with options of its device
monitor.py unplug NAME                     waits until the machine has released it
"""
import json
import os
import socket
import sys
import time

# Socket of the monitor of a machine with a slot (`slot` in host.sh).
SOCKET = "/dev/shm/monitor"


class Monitor:
    """Monitor of a QEMU, by its machine protocol."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        while self.socket.connect_ex(path) != 0:
            time.sleep(0.1)
        self.lines = self.socket.makefile("r")
        self.lines.readline()
        self.events = []
        self.order("qmp_capabilities")

    def order(self, name, **arguments):
        """Executes an order, and returns its result."""
        order = {"execute": name, "arguments": arguments}
        self.socket.sendall(json.dumps(order).encode() + b"\n")
        for line in self.lines:
            answer = json.loads(line)
            if "error" in answer:
                raise RuntimeError(f"{name}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]
            self.events.append(answer)
        raise RuntimeError(f"{name}: the monitor has closed its connection")

    def wait_for_event(self, name, **data):
        """Waits for an event with these data."""
        while True:
            for event in self.events:
                if event["event"] == name and data.items() <= event["data"].items():
                    return
            self.events = [json.loads(self.lines.readline())]


def plug(monitor, name, options):
    """Adds a disk at the slot."""
    address = {"type": "unix", "data": {"path": f"/dev/shm/{name}.socket"}}
    option, _, value = os.environ["RECONNECT"].partition("=")
    data = {"addr": address, "server": False, option: int(value)}
    backend = {"type": "socket", "data": data}
    monitor.order("chardev-add", id=name, backend=backend)
    # QEMU 7.2 crashes with MSI-X under emulation.
    device = {"driver": "vhost-user-blk-pci", "bus": "plug", "num-queues": 1, "vectors": 0}
    monitor.order("device_add", id=name, chardev=name, **device, **options)


def unplug(monitor, name):
    """Has the machine release a disk, and removes it."""
    monitor.order("device_del", id=name)
    monitor.wait_for_event("DEVICE_DELETED", device=name)
    monitor.order("chardev-remove", id=name)


def main():
    order, name, *options = sys.argv[1:]
    monitor = Monitor(SOCKET)
    if order == "plug":
        words = (option.split("=", 1) for option in options)
        plug(monitor, name, {option: {"true": True}.get(value, value) for option, value in words})
    elif order == "unplug":
        unplug(monitor, name)
    else:
        sys.exit(f"no order is called {order}")


if __name__ == "__main__":
    main()
