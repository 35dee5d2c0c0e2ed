"""Starts QEMU and passt, which inherits a connected socket: pair.py SOCKET QEMU'S ARGUMENTS... -- PASST'S ARGUMENTS...

QEMU connects to SOCKET; the connection is descriptor 3 of passt (`--fd 3`). SIGTERM ends QEMU, with which passt ends.
"""
import os
import signal
import socket
import subprocess
import sys

middle = sys.argv.index("--")
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen(1)
qemu = subprocess.Popen(["qemu-system-x86_64", *sys.argv[2:middle]])
signal.signal(signal.SIGTERM, lambda *_: qemu.terminate())
connection = server.accept()[0].detach()
os.dup2(connection, 3)
passt = subprocess.Popen(["passt", "--foreground", "--fd", "3", *sys.argv[middle + 1 :]], pass_fds=[3])
os.close(3)
if connection != 3:
    os.close(connection)
os.unlink(sys.argv[1])
server.close()
qemu.wait()
print("passt ended with status", passt.wait(10))
