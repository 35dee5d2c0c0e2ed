"""Attacks of a guest's command on objects of the kernel that no namespace separates.

Arguments: a JSON object with `scratch`, a directory to work in, and `list`, whether the default list of system calls is in
force.
"""

import ctypes
import fcntl
import json
import mmap
import os
import pty
import struct
import sys

LIBC.syscall.restype = ctypes.c_long
WHAT = json.loads(sys.argv[1])
X32 = 1 << 30
HIGH = 5 << 32
UNIX, INET, INET6, NETLINK, PACKET = 1, 2, 10, 16, 17
VSOCK = 40
# Types, with SOCK_CLOEXEC.
TYPES = [kind | 0o2000000 for kind in range(1, 7)]
TIOCSTI, TIOCLINUX = 0x5412, 0x541C


def syscall(number, *arguments):
    result = LIBC.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def low_memory(content):
    """Returns an address below 4 GiB, for 32-bit calls."""
    LIBC.mmap.restype = ctypes.c_void_p
    at = LIBC.mmap(None, ctypes.c_size_t(4096), 7, 0x22 | 0x40, -1, ctypes.c_long(0))
    ctypes.memmove(at, content, len(content))
    return at


# Function of C: number and four arguments, passed on by `int 0x80` in ebx, ecx, edx and esi. The fifth is 0.
INT80 = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint] * 5)(
    low_memory(bytes.fromhex("53 89f8 89f3 4189c9 89d1 4489ca 4489c6 31ff cd80 5b c3"))
)


def call32(number, *arguments):
    result = INT80(number, *arguments, *[0] * (4 - len(arguments)))
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def of_list(name, act):
    """An attack that only the list of system calls keeps out."""
    if WHAT["list"]:
        attempt(name, act)
    else:
        print(f"{name}: kept out")


def each(make, *choices):
    """Returns the choices with which something is made."""
    found = []
    for choice in choices:
        try:
            make(*choice)
            found.append(choice)
        except OSError:
            pass
    return found


def others():
    return [family for family in range(64) if family not in (UNIX, INET, INET6, NETLINK, PACKET)]


def families(make, high=0):
    return each(make, *[(family | high, kind, 0) for family in others() for kind in TYPES])


def socket(family, kind, protocol):
    os.close(syscall(41, family, kind, protocol))


def socket_of_x32(family, kind, protocol):
    syscall(X32 | 41, family, kind, protocol)


def pair(family, kind, protocol):
    syscall(53, family, kind, protocol, ctypes.create_string_buffer(8))


def multiplexed(family, kind, protocol):
    call32(102, 1, low_memory(struct.pack("3I", family, kind, protocol)))


def protocols():
    held = (0, 2, 4, 6, 10, 12, 15, 16)
    netlink = [(NETLINK, 3, protocol) for protocol in range(32) if protocol not in held]
    shared_memory = [(INET, 1, 256), (INET6, 1, 256)]
    high = [(NETLINK | HIGH, 3, 9 | HIGH)]
    return each(socket, *netlink, *shared_memory, *high)


def ring_setup(call, number):
    parameters = low_memory(bytes(120))
    return call(number, 4, parameters)


def keyring(call, keyctl, add_key):
    """Joins a keyring, reads those of session and user, asks for a key of any session."""
    user = low_memory(b"user\0")
    name = low_memory(b"ringfence-attack\0")
    return each(
        call,
        (keyctl, 0, -3 & 0xFFFFFFFF, 0),
        (keyctl, 1, 0),
        (keyctl, 11, -3 & 0xFFFFFFFF, name, 16),
        (keyctl, 11, -4 & 0xFFFFFFFF, name, 16),
        (add_key, user, name, name, 4),
    )


def performance(call, number):
    # A software event of this process, in user space: the kernel allows it to everyone.
    attributes = bytearray(128)
    struct.pack_into("IIQ", attributes, 0, 1, 128, 0)
    struct.pack_into("Q", attributes, 40, 1 << 5 | 1 << 6)
    return call(number, low_memory(bytes(attributes)), 0, -1 & 0xFFFFFFFF, -1 & 0xFFFFFFFF)


def file_handle():
    """Opens a directory by its handle, on a file system that the command has mounted if it may."""
    directory = WHAT["scratch"]
    # In a mount namespace of its own, so that nothing is left behind wherever this runs.
    if LIBC.unshare(0x20000) == 0 and LIBC.mount(b"none", b"/", None, ctypes.c_ulong(0x44000), None) == 0:
        LIBC.mount(b"none", directory.encode(), b"tmpfs", ctypes.c_ulong(0), None)
    os.makedirs(directory + "/handle", exist_ok=True)
    handle = ctypes.create_string_buffer(8 + 128)
    struct.pack_into("I", handle, 0, 128)
    path = (directory + "/handle").encode()
    if LIBC.name_to_handle_at(-100, path, handle, ctypes.byref(ctypes.c_int()), 0) < 0:
        return None
    root = os.open(directory, os.O_RDONLY)
    return LIBC.open_by_handle_at(root, handle, os.O_RDONLY | os.O_DIRECTORY) >= 0


def typed(request):
    """Types into a terminal of its own, and reads what was typed."""
    primary, secondary = pty.openpty()
    os.setsid()
    fcntl.ioctl(secondary, 0x540E, 0)
    syscall(16, secondary, request, ctypes.create_string_buffer(b"x"))
    return "typed"


def typed_by_32_bits():
    primary, secondary = pty.openpty()
    os.setsid()
    fcntl.ioctl(secondary, 0x540E, 0)
    call32(54, secondary, TIOCSTI, low_memory(b"x"))
    return "typed"


def main():
    attempt("families", lambda: families(socket))
    attempt("families with high bits", lambda: families(socket, HIGH))
    attempt("families in pairs", lambda: families(pair))
    attempt("families by x32", lambda: families(socket_of_x32))
    attempt("families by int 0x80", lambda: families(lambda *a: call32(359, *a)))
    attempt("families in pairs by int 0x80", lambda: families(lambda *a: call32(360, *a, low_memory(bytes(8)))))
    attempt("families by socketcall", lambda: families(multiplexed))
    attempt("protocols", protocols)
    attempt("ring", lambda: ring_setup(syscall, 425))
    attempt("ring by x32", lambda: ring_setup(syscall, X32 | 425))
    attempt("ring by int 0x80", lambda: ring_setup(call32, 425))
    of_list("keyrings", lambda: keyring(syscall, 250, 248))
    of_list("keyrings by x32", lambda: keyring(syscall, X32 | 250, X32 | 248))
    of_list("keyrings by int 0x80", lambda: keyring(call32, 288, 286))
    of_list("performance events", lambda: performance(lambda n, *a: syscall(n, *a, 0), 298))
    of_list("performance events by int 0x80", lambda: performance(call32, 336))
    of_list("userfaultfd", lambda: syscall(323, 1))
    of_list("userfaultfd by int 0x80", lambda: call32(374, 1))
    of_list("file handle", file_handle)
    of_list("typing", lambda: typed(TIOCSTI))
    of_list("typing with high bits", lambda: typed(TIOCSTI | HIGH))
    of_list("typing by int 0x80", typed_by_32_bits)
    of_list("kernel log", lambda: syscall(103, 10, 0, 0))
    of_list("kernel log by int 0x80", lambda: call32(103, 10, 0, 0))


if __name__ == "__main__":
    main()
