#!/usr/bin/env python3
"""Runs a machine that migrates while its disk is in use: migrate.py FOLDER QEMU ARGUMENT...

The machine's disk is on the socket `source.socket` in FOLDER, and that of the machine which takes its state on
`target.socket`. Both disks have the image `source.img`. The machine writes `ready` to the last sector of its disk. It then
migrates, and finds `moved` and the figures of the migration in the sector before that one. The first QEMU ends, and this
program ends with the second one.
"""
import os
import subprocess
import sys
import time

from monitor import Monitor

SECTOR = 512


def start(folder, side, qemu, arguments):
    """Starts the QEMU of one side, with its disk and a monitor. It ends with this program."""
    if side == "target":
        # It has a console of its own: a file is emptied when it is opened.
        arguments = [f"{word}.target" if word.startswith("file:") else word for word in arguments]
    disk = f"socket,id=disk,path={folder}/{side}.socket,{os.environ['RECONNECT']}"
    # QEMU 7.2 crashes with MSI-X under emulation.
    device = "vhost-user-blk-pci,chardev=disk,num-queues=1,vectors=0,addr=0x12"
    monitor = f"unix:{folder}/{side}.monitor,server=on,wait=off"
    words = ["setpriv", "--pdeathsig", "KILL", "--", qemu, *arguments, "-qmp", monitor]
    words += ["-chardev", disk, "-device", device]
    if side == "target":
        words += ["-incoming", f"unix:{folder}/state"]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL)


def migrate(folder, source):
    """Migrates the machine once it is ready, and tells it the figures."""
    image = os.open(f"{folder}/source.img", os.O_RDWR)
    end = os.fstat(image).st_size
    while not os.pread(image, SECTOR, end - SECTOR).startswith(b"ready"):
        if source.poll() is not None:
            return
        time.sleep(0.1)
    monitor = Monitor(f"{folder}/source.monitor")
    # So slow that the machine uses its disk for seconds meanwhile, and fast enough to come to an end.
    monitor.order("migrate-set-parameters", **{"downtime-limit": 2000, "max-bandwidth": 32 << 20})
    monitor.order("migrate", uri=f"unix:{folder}/state")
    while (state := monitor.order("query-migrate"))["status"] != "completed":
        if state["status"] in ("failed", "cancelled"):
            raise RuntimeError(f"the machine did not migrate: {state}")
        time.sleep(0.1)
    rounds, memory = state["ram"]["dirty-sync-count"], state["ram"]["transferred"] >> 20
    text = f"moved in {state['total-time']} ms: {rounds} rounds, {memory} MiB, stopped for {state['downtime']} ms\n"
    os.pwrite(image, text.encode().ljust(SECTOR, b"\0"), end - 2 * SECTOR)
    monitor.order("quit")


def main():
    folder, qemu, *arguments = sys.argv[1:]
    target = start(folder, "target", qemu, arguments)
    source = start(folder, "source", qemu, arguments)
    migrate(folder, source)
    source.wait()
    sys.exit(target.wait())


main()
