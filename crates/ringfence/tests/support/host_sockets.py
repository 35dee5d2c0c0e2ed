"""Program of the host that binds sockets, moves them, and waits.

Arguments: what to do, and the directory to do it in. Prints `ready` once the sockets are there.
"""

import os
import socket
import sys
import time

ACT, TOP = sys.argv[1], sys.argv[2]
KEPT = []


def bind(name):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen()
    KEPT.append(listener)


def path(name):
    return os.path.join(TOP, name)


def renamed(name):
    bind(path(name + ".new"))
    os.rename(path(name + ".new"), path(name))


def linked(name):
    """OpenSSH makes the socket of a master connection in this way."""
    bind(path(name + ".new"))
    os.link(path(name + ".new"), path(name))
    os.unlink(path(name + ".new"))


def moved():
    renamed("renamed")
    linked("linked")
    bind(path("second"))
    os.link(path("second"), path("second link"))
    os.mkdir(path("before"))
    bind(path("before/in"))
    os.rename(path("before"), path("after"))
    os.makedirs(path("one"))
    os.makedirs(path("two"))
    bind(path("one/x"))
    os.rename(path("one/x"), path("two/y"))
    os.rmdir(path("one"))
    os.mkdir(path("relative"))
    os.chdir(path("relative"))
    bind("here")
    bind(path("line\nbreak"))
    bind(os.fsencode(path("")) + b"\xff\xfe\x01")


def relative():
    os.mkdir(path("in"))
    os.chdir(TOP)
    bind("in/here")


def ssh():
    os.makedirs(path(".ssh/masters"))
    with open(path(".ssh/config"), "w") as file:
        file.write("config\n")
    linked(".ssh/a")
    linked(".ssh/masters/b")


def crowd():
    for number in range(1100):
        bind(path(f"s{number}"))
    open(path("file"), "w").close()


def run():
    os.makedirs(TOP)
    with open(path("kept"), "w") as file:
        file.write("kept\n")
    bind(path("first"))
    open(path("ready"), "w").close()
    go = sys.argv[3]
    while not os.path.exists(go):
        time.sleep(0.05)
    bind(path("second"))
    open(go + ".done", "w").close()


ACTS = {"moved": moved, "relative": relative, "ssh": ssh, "crowd": crowd, "run": run}
ACTS["renamed"] = lambda: renamed("renamed")
ACTS[ACT]()
print("ready", flush=True)
time.sleep(600 if ACT != "run" else 20)
