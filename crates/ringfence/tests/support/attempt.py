"""Attempts of attacks by a guest's command, and calls of the C library. The text of a program of attacks follows this one.

Each attempt prints `NAME: reached WHAT` or `NAME: kept out`.
"""

import ctypes
import json
import os
import sys

LIBC = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    result = getattr(LIBC, name)(*[os.fsencode(a) if isinstance(a, str) else a for a in arguments])
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def mount(source, target, kind=None, flags=0, data=None):
    call("mount", source, target, kind, ctypes.c_ulong(flags), data)


def attempt(name, act):
    """Runs the attack in a child, so that attacks do not help or hinder each other."""
    sys.stdout.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = act()
        except OSError:
            found = None
        os.write(writer, json.dumps(found or None).encode())
        os._exit(0)
    os.close(writer)
    found = os.read(reader, 65536).decode()
    os.close(reader)
    os.waitpid(child, 0)
    print(f"{name}: kept out" if found == "null" else f"{name}: reached {found or 'nothing: it died'}")


