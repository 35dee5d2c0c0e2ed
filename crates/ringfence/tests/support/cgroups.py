"""Attacks of a guest's command on cgroups outside of its guest.

Arguments: the name of a cgroup of the same user that the guest must not change, and a directory to work in.
"""

import os
import sys

NEWNS, NEWUSER, NEWCGROUP = 0x20000, 0x10000000, 0x02000000
REMOUNT, BIND, DETACH = 32, 4096, 2
PRIVATE_REC = (1 << 18) | 16384
VICTIM, SCRATCH = sys.argv[1:]
CGROUPS = "/sys/fs/cgroup"


def quietly(act, *arguments):
    try:
        act(*arguments)
    except OSError:
        pass


def mount_points():
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        for line in file:
            if " - cgroup" in line:
                yield line.split(" ")[4]


def writable(*tops):
    """Returns a file of a cgroup that opens for writing. Opening one has no effect."""
    for top in tops:
        for directory, _, files in os.walk(top):
            for name in files:
                path = os.path.join(directory, name)
                try:
                    os.close(os.open(path, os.O_WRONLY))
                    return path
                except OSError:
                    pass
    return None


def everywhere():
    return writable(CGROUPS, *mount_points())


def directory(name):
    path = os.path.join(SCRATCH, f"{name}-{os.getpid()}")
    os.mkdir(path)
    return path


def remount():
    for point in [CGROUPS, "/sys", *mount_points()]:
        quietly(mount, None, point, None, REMOUNT)
        quietly(mount, None, point, None, REMOUNT | BIND)
    return everywhere()


def uncover():
    for point in [*mount_points(), CGROUPS, "/sys"] * 3:
        quietly(call, "umount2", point, DETACH)
    return everywhere()


def others(top):
    """Returns what a hierarchy shows beyond the guest: the victim, or a process without a number in the guest."""
    for path, directories, _ in os.walk(top):
        if VICTIM in directories:
            return os.path.join(path, VICTIM)
    with open(os.path.join(top, "cgroup.procs")) as file:
        if "0" in file.read().split():
            return f"processes of others in {top}"
    return None


def mount_anew():
    """Mounts each kind of hierarchy, and looks for what is not the guest's."""
    kinds = [("cgroup2", None)]
    kinds += [("cgroup", name) for name in ["memory", "pids", "cpu", "freezer", "none,name=systemd"]]
    for number, (kind, data) in enumerate(kinds):
        point = directory(f"mount{number}")
        try:
            mount("none", point, kind, 0, data)
        except OSError:
            continue
        found = others(point) if kind == "cgroup2" else writable(point)
        if found:
            return found
    return None


def in_namespaces_of_its_own():
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", NEWUSER | NEWNS | NEWCGROUP)
    for name, text in [("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")]:
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    mount(None, "/", None, PRIVATE_REC)
    return mount_anew() or remount() or uncover()


def other_path():
    """A cgroup namespace has the guest's own cgroup at its root, so no path leads above it."""
    with open("/proc/self/cgroup") as file:
        for line in file:
            if VICTIM.rsplit("-", 1)[0] in line:
                return line
    return None


attempt("hierarchies as they are", everywhere)
attempt("mounted again for writing", remount)
attempt("without what covers them", uncover)
attempt("a hierarchy mounted anew", mount_anew)
attempt("with namespaces of its own", in_namespaces_of_its_own)
attempt("path of the launcher", other_path)
