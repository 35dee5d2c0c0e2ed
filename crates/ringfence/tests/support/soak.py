"""Load of the soak test of real programs.

soak.py serve ADDRESS                 servers: TCP echo and sleep at 7300, UDP at 7301, uploads by HTTP at 7302; prints `listening`
soak.py guest ADDRESS FILE WORKERS    runs the programs of FILE (JSON: name, command, own failure), and flows of its own, until there
                                      is a file `end`

The guest prints a line for each attempt: NAME ok|excused|FAILED milliseconds detail. An attempt that fails is excused if the host's
address changed meanwhile (file `epoch`): its connections cannot live on. So is the own failure of a program if the MTU fell
meanwhile (file `falls`). With a file `pause` it ends all flows, prints `paused`, and
goes on when the file is gone.
"""

import hashlib
import http.server
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

PORT = 7300
# Time limit of an attempt, and of an answer.
PROGRAM = 90
ANSWER = 60
# Pauses of flows in seconds: most connections of real programs are silent most of the time.
SILENCE = (1, 20)
SLEEP = (20, 90)
# Attempts at a datagram, which a path may lose; pauses before answers; and the time in which an answer must follow.
DATAGRAMS = 12
ANSWERS_AFTER = (0, 25)
ANSWER_WITHIN = 3
# Longest attempt in seconds: the guest's load prints it, and a pause may take as long.
LONGEST = max(
    PROGRAM,
    3 * ANSWER,
    ANSWER + SLEEP[1] + ANSWER,
    sum(DATAGRAMS * (pause + ANSWER_WITHIN) for pause in ANSWERS_AFTER),
)
# Port of a program that peers call back.
OWN_PORT = 41641


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def content(name):
    try:
        with open(name) as file:
            return file.read()
    except OSError:
        return ""


def epoch():
    return content("epoch")


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def exactly(connection, count):
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("ended early")
        data += part
    return data


# Servers.

def serve_stream(connection):
    """Answers `E LENGTH` and bytes by the bytes, and `S SECONDS` by `woke` after that time."""
    with connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        while True:
            try:
                kind, count = exactly(connection, 16).decode().split()
                if kind == "E":
                    connection.sendall(exactly(connection, int(count)))
                else:
                    time.sleep(int(count))
                    connection.sendall(b"woke")
            except (OSError, ValueError):
                return


def serve_datagrams(address):
    """Answers by the client's port, and calls back at once and again after half a minute."""
    server = socket.socket(family(address), socket.SOCK_DGRAM)
    server.bind((address, PORT + 1))

    def answer(data, client, pause):
        time.sleep(pause)
        server.sendto(b"%s %d %d" % (data, client[1], pause), client)

    while True:
        data, client = server.recvfrom(2000)
        pause = int(data.split()[1])
        threading.Thread(target=answer, args=(data.split()[0], client, pause), daemon=True).start()


class Upload(http.server.BaseHTTPRequestHandler):
    def do_PUT(self):
        """Answers with the hash of the body."""
        answer = hashlib.sha256(self.rfile.read(int(self.headers["Content-Length"]))).hexdigest().encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def serve(address):
    uploads = http.server.ThreadingHTTPServer((address, PORT + 2), Upload)
    threading.Thread(target=uploads.serve_forever, daemon=True).start()
    threading.Thread(target=serve_datagrams, args=(address,), daemon=True).start()
    server = socket.create_server((address, PORT), family=family(address), backlog=128)
    say("listening")
    while True:
        connection, _ = server.accept()
        threading.Thread(target=serve_stream, args=(connection,), daemon=True).start()


# The guest.

class Load:
    def __init__(self, address):
        self.address = address
        self.lock = threading.Lock()
        self.busy = 0

    def is_ended(self):
        return os.path.exists("end")

    def is_paused(self):
        return os.path.exists("pause") or self.is_ended()

    def wait(self, seconds):
        """Returns False if the load pauses before the time is over."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.is_paused():
                return False
            time.sleep(0.1)
        return not self.is_paused()

    def attempt(self, name, action, since=None, own_failure=None):
        """Runs an attempt of a flow that began in the epoch `since`, and prints its result. Returns True if it succeeded."""
        before, falls, began = since or epoch(), content("falls"), time.monotonic()
        try:
            action()
            outcome, detail = "ok", ""
        except Exception as error:
            outcome, detail = "FAILED", " ".join(f"{type(error).__name__}: {error}".split())[-300:]
            is_own = own_failure and own_failure in detail and content("falls") != falls
            if epoch() != before or is_own:
                outcome = "excused"
        say(name, outcome, int((time.monotonic() - began) * 1000), detail)
        return outcome == "ok"

    def repeat(self, action):
        """Runs an action again and again until the end. None begins during a pause."""
        while not self.is_ended():
            with self.lock:
                may = not self.is_paused()
                self.busy += may
            if may:
                try:
                    action()
                finally:
                    with self.lock:
                        self.busy -= 1
            time.sleep(0.1)

    def program(self, name, command, own_failure):
        at = f"at-{name}"

        def run():
            shutil.rmtree(at, ignore_errors=True)
            os.makedirs(at)
            with open(f"{at}.said", "w+", errors="replace") as said:
                child = subprocess.Popen(["sh", "-ec", command.replace("{at}", at)], stdin=subprocess.DEVNULL, stdout=said,
                                         stderr=subprocess.STDOUT, start_new_session=True)
                try:
                    status = child.wait(PROGRAM)
                except subprocess.TimeoutExpired:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
                    raise
                said.seek(0)
                if status:
                    raise RuntimeError(f"status {status}: {said.read()[-200:]}")

        self.attempt(name, run, own_failure=own_failure)

    def connect(self):
        connection = socket.create_connection((self.address, PORT), ANSWER)
        connection.settimeout(ANSWER)
        return connection

    def echo_flow(self):
        """A connection that says something now and then, as a session of ssh with keep-alives."""
        flow, before = [], epoch()

        def exchange():
            if not flow:
                flow.append(self.connect())
            data = os.urandom(random.randint(1, 1 << 16))
            flow[0].sendall(b"E %-14d" % len(data))
            flow[0].sendall(data)
            if exactly(flow[0], len(data)) != data:
                raise RuntimeError("other bytes came back")

        while self.attempt("stream", exchange, before) and epoch() == before and self.wait(random.randint(*SILENCE)):
            pass
        for connection in flow:
            connection.close()

    def sleeping_flow(self):
        """A connection at which the server speaks first after a long silence, as at a client of MQTT that sleeps."""
        def sleep():
            with self.connect() as connection:
                seconds = random.randint(*SLEEP)
                connection.sendall(b"S %-14d" % seconds)
                connection.settimeout(seconds + ANSWER)
                if exactly(connection, 4) != b"woke":
                    raise RuntimeError("other bytes came")

        self.attempt("sleeper", sleep)

    def datagrams(self):
        """A port that peers call back, as a peer of WireGuard: they see the same port as long as it is used."""
        with socket.socket(family(self.address), socket.SOCK_DGRAM) as own:
            own.bind(("::" if ":" in self.address else "0.0.0.0", OWN_PORT))
            number, before, seen = 0, epoch(), set()

            def exchange(pause):
                nonlocal number
                for _ in range(DATAGRAMS):
                    number += 1
                    own.settimeout(pause + ANSWER_WITHIN)
                    own.sendto(b"%d %d" % (number, pause), (self.address, PORT + 1))
                    try:
                        while True:
                            word, port, paused = own.recv(2000).split()
                            seen.add(int(port))
                            if int(word) == number and int(paused) == pause:
                                return
                    except TimeoutError:
                        pass
                raise RuntimeError(f"{DATAGRAMS} datagrams have no answer")

            def call():
                for pause in ANSWERS_AFTER:
                    exchange(pause)
                if len(seen) > 1 and epoch() == before:
                    raise RuntimeError(f"peers saw the ports {sorted(seen)}")

            while self.attempt("datagrams", call, before) and epoch() == before and self.wait(1):
                pass


def guest(address, file, workers):
    with open(file) as programs:
        programs = json.load(programs)
    load = Load(address)
    queue = []

    def next_program():
        with load.lock:
            if not queue:
                queue.extend(random.sample(sorted(programs.items()), len(programs)))
            name, (command, own_failure) = queue.pop()
            # Two of one name would use the same directory.
            if name in running:
                return
            running.add(name)
        try:
            load.program(name, command, own_failure)
        finally:
            with load.lock:
                running.discard(name)

    running = set()
    actions = [next_program] * workers + [load.echo_flow] * 3 + [load.sleeping_flow] * 3 + [load.datagrams]
    threads = [threading.Thread(target=load.repeat, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    say("longest", LONGEST)
    say("loaded")
    was_paused = False
    while not load.is_ended():
        with load.lock:
            is_paused = os.path.exists("pause") and load.busy == 0
        if is_paused != was_paused:
            say("paused" if is_paused else "resumed")
            was_paused = is_paused
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    say("finished")


if sys.argv[1] == "serve":
    serve(sys.argv[2])
else:
    guest(sys.argv[2], sys.argv[3], int(sys.argv[4]))
