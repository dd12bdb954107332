"""Runs a command in a box: python box.py [WHAT ...] -- COMMAND ...

deny=NAME          the kernel refuses this system call to it and all its children (EPERM)
cgroup=FOLDER      it runs in this control group
no-huge-pages      it gets none, whatever it asks for
small-shm          /dev/shm holds 64 MB (needs a mount namespace)
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

# Numbers on x86-64.
CALLS = {"sched_setaffinity": 203, "memfd_create": 319}
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_SET_THP_DISABLE = 22, 38, 41
SECCOMP_MODE_FILTER = 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
RETURN_ERRNO, RETURN_ALLOW = 0x00050000, 0x7FFF0000
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x00020000, 0x4000, 1 << 18

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def deny(name: str) -> None:
    """A filter of four instructions: load the call's number, compare, refuse or allow."""

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("<HBBI", code, if_true, if_false, value)

    code = (
        instruction(LOAD, 0)
        + instruction(JUMP_IF_EQUAL, CALLS[name], 0, 1)
        + instruction(RETURN, RETURN_ERRNO | errno.EPERM)
        + instruction(RETURN, RETURN_ALLOW)
    )
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    checked(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(program, len(program)), 0, 0))


def small_shm() -> None:
    checked(libc.unshare(CLONE_NEWNS))
    checked(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    checked(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64M"))


def enter(what: str) -> None:
    name, _, value = what.partition("=")
    if name == "deny":
        deny(value)
    elif name == "cgroup":
        with open(os.path.join(value, "cgroup.procs"), "w") as file:
            file.write(str(os.getpid()))
    elif name == "no-huge-pages":
        checked(libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0))
    elif name == "small-shm":
        small_shm()
    else:
        raise ValueError(what)


if __name__ == "__main__":
    separator = sys.argv.index("--")
    for each in sys.argv[1:separator]:
        enter(each)
    os.execvp(sys.argv[separator + 1], sys.argv[separator + 1 :])
