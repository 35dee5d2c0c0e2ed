"""Way of the kernel's network tests to their remote endpoint, dom0: REMOTE_TYPE=dom0, REMOTE_ARGS=ADDRESS.

A command goes to `server.py` over a TCP connection of its own, as one line of JSON. The answer is one line: status, output,
error output. The end of the connection ends the command. Both ends have the same files.
"""

import json
import os
import socket
import subprocess
import sys

PORT = 7300


class Remote:
    def __init__(self, name, dir_path):
        self.name = name
        self.dir_path = dir_path

    def cmd(self, comm):
        words = [sys.executable, "-E", "-s", "-S", __file__, self.name, comm]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def deploy(self, what):
        return os.path.abspath(os.path.join(self.dir_path, what))


def main():
    with socket.create_connection((sys.argv[1], PORT)) as connection:
        connection.sendall(json.dumps(sys.argv[2]).encode() + b"\n")
        answer = connection.makefile().readline()
    if not answer:
        sys.exit("dom0 did not answer")
    status, output, errors = json.loads(answer)
    sys.stdout.write(output)
    sys.stderr.write(errors)
    sys.exit(status)


if __name__ == "__main__":
    main()
