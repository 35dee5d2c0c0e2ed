"""Attacks of a guest's command on what is covered in its view of the host's files.

Arguments: a JSON object with `runtime`, the runtime directory; `handle`, a file handle of it taken outside, in
hexadecimal, with `handle_type`; `scratch`, a directory to work in.
"""

import ctypes
import fcntl
import json
import os
import sys

BIND, REC, MOVE, DETACH, REMOUNT = 4096, 16384, 8192, 2, 32
PRIVATE, SHARED = 1 << 18, 1 << 20
NEWNS, NEWUSER, NEWPID = 0x20000, 0x10000000, 0x20000000
WHAT = json.loads(sys.argv[1])
RUNTIME, SCRATCH = WHAT["runtime"], WHAT["scratch"]


def is_there(directory):
    """Returns what tells the host's runtime directory from the guest's own: the switch's socket."""
    try:
        return [name for name in os.listdir(directory) if name.endswith(".sock")]
    except OSError:
        return []


def tries(*acts):
    """Does one after the other, whatever becomes of each."""
    for act in acts:
        try:
            act()
        except OSError:
            pass


def ancestors(path):
    while path != "/":
        path = os.path.dirname(path)
        yield path


def in_namespace(act, flags=NEWNS):
    def inside():
        call("unshare", flags)
        if flags & NEWUSER:
            with open("/proc/self/setgroups", "w") as file:
                file.write("deny")
            with open("/proc/self/uid_map", "w") as file:
                file.write("0 0 1")
        return act()

    return inside


def mount_points():
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        return [line.split()[4] for line in file]


def unmount_all():
    for _ in range(2):
        for point in reversed(mount_points()):
            for flags in (0, DETACH):
                tries(lambda: call("umount2", point, flags))
    return is_there(RUNTIME)


def move_away():
    os.makedirs(SCRATCH + "/moved", exist_ok=True)
    for path in [RUNTIME, *ancestors(RUNTIME)]:
        tries(lambda: mount(path, SCRATCH + "/moved", flags=MOVE))
    return is_there(RUNTIME)


def bind_above(flags):
    target = SCRATCH + "/bound"
    os.makedirs(target, exist_ok=True)
    for path in ancestors(RUNTIME):
        below = target + "/" + os.path.relpath(RUNTIME, path)
        tries(
            lambda: mount(path, target, flags=BIND | flags),
            lambda: mount("none", target, flags=PRIVATE | REC),
            lambda: call("umount2", below, DETACH),
            lambda: call("umount2", os.path.dirname(below), DETACH),
        )
        if found := is_there(below):
            return found
    return None


def clone_tree(recursive):
    for path in ancestors(RUNTIME):
        flags = 1 | os.O_CLOEXEC | (0x8000 if recursive else 0)
        tree = LIBC.syscall(428, -100, path.encode(), flags)
        if tree < 0:
            continue
        below = f"/proc/self/fd/{tree}/" + os.path.relpath(RUNTIME, path)
        tries(lambda: call("umount2", below, DETACH), lambda: call("umount2", os.path.dirname(below), DETACH))
        if found := is_there(below):
            return found
    return None


def pivot():
    new = SCRATCH + "/new"
    os.makedirs(new, exist_ok=True)
    mount("none", new, "tmpfs")
    os.mkdir(new + "/old")
    call("pivot_root", new, new + "/old")
    below = "/old" + RUNTIME
    tries(lambda: call("umount2", below, DETACH), lambda: call("umount2", os.path.dirname(below), DETACH))
    return is_there(below)


def overlay():
    merged = SCRATCH + "/merged"
    os.makedirs(merged, exist_ok=True)
    for path in list(ancestors(RUNTIME)):
        tries(lambda: mount("none", merged, "overlay", 0, f"lowerdir={path}:{SCRATCH}".encode()))
        if found := is_there(merged + "/" + os.path.relpath(RUNTIME, path)):
            return found
    return None


def other_processes():
    for process in [name for name in os.listdir("/proc") if name.isdigit()]:
        for link in ("root", "cwd"):
            if found := is_there(f"/proc/{process}/{link}{RUNTIME}") or is_there(f"/proc/{process}/{link}"):
                return found
        try:
            descriptors = os.listdir(f"/proc/{process}/fd")
        except OSError:
            continue
        for fd in descriptors:
            path = f"/proc/{process}/fd/{fd}"
            if found := is_there(path) or is_there(path + "/ringfence"):
                return found
    return None


def descriptors_of_init():
    # Root may list the numbers; what they are is another matter.
    found = []
    for number in range(300):
        tries(lambda: found.append(os.readlink(f"/proc/1/fd/{number}")))
        tries(lambda: found.append(os.open(f"/proc/1/fd/{number}", os.O_RDONLY | os.O_NONBLOCK)))
    tries(lambda: found.append(os.readlink("/proc/1/root")), lambda: found.append(os.readlink("/proc/1/cwd")))
    tries(lambda: found.append(os.open("/proc/1/mem", os.O_RDONLY)))
    return found


def trace_init():
    call("ptrace", 16, 1, 0, 0)
    # Init goes on without its tracer. Otherwise it would stay stopped, and the guest would not end.
    os.waitpid(1, 0x40000000)
    call("ptrace", 17, 1, 0, 0)
    return "traced"


def take_descriptor_of_init():
    pidfd = call("syscall", 434, 1, 0)
    return [call("syscall", 438, pidfd, number, 0) for number in range(3, 8)]


def outer_namespaces():
    own = os.open("/proc/self/ns/user", os.O_RDONLY)
    mounts = os.open("/proc/self/ns/mnt", os.O_RDONLY)
    reached = []
    # NS_GET_PARENT of the user namespace, NS_GET_USERNS of both.
    for fd, request in ((own, 0xB702), (own, 0xB701), (mounts, 0xB701)):
        try:
            outer = fcntl.ioctl(fd, request)
            call("setns", outer, 0)
            reached.append(request)
        except OSError:
            pass
    return reached


def by_handle():
    handle = bytes.fromhex(WHAT["handle"])
    size = len(handle)

    class Handle(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_uint), ("kind", ctypes.c_int), ("data", ctypes.c_ubyte * size)]

    value = Handle(size, WHAT["handle_type"], (ctypes.c_ubyte * size)(*handle))
    for point in mount_points():
        try:
            root = os.open(point, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        fd = LIBC.open_by_handle_at(root, ctypes.byref(value), os.O_RDONLY | os.O_DIRECTORY)
        if fd >= 0 and (found := is_there(f"/proc/self/fd/{fd}")):
            return found
    return None


def working_directory():
    return is_there(".") or is_there("ringfence")


def main():
    attempt("listing", lambda: is_there(RUNTIME))
    attempt("working directory", working_directory)
    attempt("unmounting", unmount_all)
    attempt("unmounting in a mount namespace", in_namespace(unmount_all))
    attempt("unmounting in a user namespace", in_namespace(unmount_all, NEWUSER | NEWNS))
    attempt("moving", move_away)
    attempt("binding", lambda: bind_above(0))
    attempt("binding all", lambda: bind_above(REC))
    attempt("binding in a mount namespace", in_namespace(lambda: bind_above(REC)))
    attempt("cloning", lambda: clone_tree(False))
    attempt("cloning all", lambda: clone_tree(True))
    attempt("pivoting", in_namespace(pivot))
    attempt("overlay", in_namespace(overlay))
    attempt("other processes", other_processes)
    attempt("outer namespaces", outer_namespaces)
    attempt("descriptors of init", descriptors_of_init)
    attempt("tracing init", trace_init)
    attempt("taking descriptors of init", take_descriptor_of_init)
    attempt("file handle", by_handle)


main()
