"""Runs commands in dom0 for the kernel's network tests of a guest: the other end of `remote_dom0.py`."""

import json
import os
import signal
import socketserver
import subprocess
import threading

PORT = 7300


class Command(socketserver.StreamRequestHandler):
    def handle(self):
        command = json.loads(self.rfile.readline())
        process = subprocess.Popen(
            command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        threading.Thread(target=self.end_with_connection, args=(process,), daemon=True).start()
        output, errors = process.communicate()
        answer = [process.returncode % 256, output.decode(errors="replace"), errors.decode(errors="replace")]
        try:
            self.wfile.write(json.dumps(answer).encode() + b"\n")
        except OSError:
            # The command ended with the connection.
            pass

    def end_with_connection(self, process):
        try:
            self.rfile.read(1)
        except (OSError, ValueError):
            pass
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


Server(("", PORT), Command).serve_forever()
