"""Starts QEMU and passt, which inherits a connected socket: pair.py SOCKET QEMU'S ARGUMENTS... -- PASST'S ARGUMENTS...

QEMU connects to SOCKET; passt gets the other end of the connection (`--fd`). SIGTERM ends QEMU, with which passt ends.
"""
import os
import signal
import socket
import subprocess
import sys

middle = sys.argv.index("--")
with socket.socket(socket.AF_UNIX) as server:
    server.bind(sys.argv[1])
    server.listen(1)
    qemu = subprocess.Popen(["qemu-system-x86_64", *sys.argv[2:middle]])
    signal.signal(signal.SIGTERM, lambda *_: qemu.terminate())
    connection = server.accept()[0]
os.unlink(sys.argv[1])
# No copy of the connection stays here, so that each end notices when the other ends.
with connection:
    number = connection.fileno()
    words = ["passt", "--foreground", "--fd", str(number), *sys.argv[middle + 1 :]]
    passt = subprocess.Popen(words, pass_fds=[number])
qemu.wait()
print("passt ended with status", passt.wait(10))
