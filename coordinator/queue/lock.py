"""Who has a queue file. SQLite's own locks say so: they die with their process, however it ends, and know its id."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

# Where SQLite locks a database file, and how far (its pending, reserved and shared bytes).
_LOCK_START, _LOCK_LENGTH = 0x40000000, 512
_FLOCK = "hhqqi4x"  # struct flock of Linux on 64-bit machines: type, whence, start, length, pid

# Files that this process has open, by device and inode. Closing any other descriptor of one would drop SQLite's locks.
_ours: set[tuple[int, int]] = set()
_opening = threading.Lock()


@contextlib.contextmanager
def opening(path: Path) -> Iterator[tuple[int, int]]:
    """While a file is opened: its identity. BlockingIOError when this process has it open already."""
    with _opening:
        status = os.stat(path)
        identity = (status.st_dev, status.st_ino)
        if identity in _ours:
            raise BlockingIOError
        yield identity


def take(identity: tuple[int, int]) -> None:
    """It has been opened. Within opening()."""
    _ours.add(identity)


def give_back(identity: tuple[int, int]) -> None:
    """It has been closed."""
    _ours.discard(identity)


def forget_all() -> None:
    """In a forked child: the locks are the parent's."""
    global _opening
    _opening = threading.Lock()
    _ours.clear()


def holder(path: Path) -> int | None:
    """The process that has locked the database; None when nobody has, or who cannot be told. Within opening()."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, _LOCK_START, _LOCK_LENGTH, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        finally:
            os.close(fd)
        return pid if kind != fcntl.F_UNLCK and pid > 0 else None
    return None
