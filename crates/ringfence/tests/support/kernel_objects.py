"""Attacks of a guest's command on kernel objects of others that have a name: shared memory, queues, sockets, processes,
descriptors, timers.

Argument: a JSON object. With `role` "victim" the program makes the objects on the host, prints `ready`, and waits for the
end of its input. Otherwise it attacks them.
"""

import json
import os
import socket
import sys
import time

CREAT, RDWR = 0o100, 2
IPC_CREAT, IPC_RMID = 0o1000, 0
WHAT = json.loads(sys.argv[1])


def victim():
    key, name = WHAT["key"], WHAT["queue"]
    shared = call("shmget", key, 4096, IPC_CREAT | 0o666)
    messages = call("msgget", key, IPC_CREAT | 0o666)
    semaphores = call("semget", key, 1, IPC_CREAT | 0o666)
    os.umask(0)
    queue = call("mq_open", name, CREAT | RDWR, 0o666, None)
    os.fchmod(queue, 0o666)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + WHAT["abstract"])
    listener.listen()
    print("ready", flush=True)
    sys.stdin.read()
    call("shmctl", shared, IPC_RMID, None)
    call("msgctl", messages, IPC_RMID, None)
    call("semctl", semaphores, 0, IPC_RMID)
    call("mq_unlink", name)


def id_of(name, *arguments):
    return f"{name} {call(name, *arguments)}"


def connect_abstract():
    socket.socket(socket.AF_UNIX).connect("\0" + WHAT["abstract"])
    return "connected"


def open_queue_file():
    directory = WHAT["queues"]
    path = directory + WHAT["queue"]
    os.close(os.open(path, os.O_RDWR))
    return path


def processes_of_others():
    """Returns processes that are not in this process's PID namespace."""
    own = os.readlink("/proc/self/ns/pid")
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/ns/pid") != own:
                found.append(pid)
        except OSError:
            pass
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if f"{WHAT['marker']}-".encode() in file.read():
                    found.append(pid)
        except OSError:
            pass
    return found


def descriptors_beyond_the_standard_streams():
    """Returns what is open besides the streams, the pipe of `attempt` and the directory that is listed."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if int(fd) > 2 and not link.startswith(("pipe:", "/proc/")):
            found.append(f"{fd}: {link}")
    return found


def set_clock():
    time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME))
    return "set"


def alarm_timer():
    """Timers that wake the machine up are the whole machine's."""
    for clock in (8, 9):
        try:
            return f"timerfd {call('timerfd_create', clock, 0)}"
        except OSError:
            pass
    return None


def timers_of_others():
    with open("/proc/timer_list") as file:
        return file.read(100)


def main():
    key = WHAT["key"]
    attempt("shared memory", lambda: id_of("shmget", key, 0, 0))
    attempt("message queue of System V", lambda: id_of("msgget", key, 0))
    attempt("semaphores", lambda: id_of("semget", key, 0, 0))
    attempt("message queue of POSIX", lambda: id_of("mq_open", WHAT["queue"], RDWR))
    attempt("file of a message queue", open_queue_file)
    attempt("abstract socket", connect_abstract)
    attempt("processes and namespaces of others", processes_of_others)
    attempt("inherited descriptors", descriptors_beyond_the_standard_streams)
    attempt("clock", set_clock)
    attempt("timer that wakes the machine", alarm_timer)
    attempt("timers of others", timers_of_others)


if WHAT.get("role") == "victim":
    victim()
else:
    main()
