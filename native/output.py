"""Writing a large file so that it appears complete or not at all, and saying what to do when it cannot be."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coremill.config.errors import PackError

TEMPORARY = re.compile(r"\.packing-[0-9a-f]{16}")


@contextmanager
def output_file(out: Path, nbytes: int, *, in_cache: bool = True) -> Iterator[int]:
    """A file of `nbytes` that becomes `out` when the block ends well, and is gone when it does not.

    It is locked while being written, so that a leftover of a killed process is known by its free lock.
    PackError when that fails; `in_cache` is for its advice.
    """
    try:
        temporary, fd = _create_locked(out.parent)
    except OSError as error:
        raise write_error(error, out, nbytes, in_cache=in_cache) from error
    try:
        _allocate(fd, nbytes)
        yield fd
        os.fchmod(fd, 0o444)
        os.fsync(fd)
        # Dropped from the page cache, so that it comes back in large folios when mapped.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.rename(temporary, out)
        _sync_folder(out.parent)
    except BaseException as error:
        _remove(temporary)
        if isinstance(error, OSError):
            raise write_error(error, out, nbytes, in_cache=in_cache) from error
        raise
    finally:
        os.close(fd)


def _create_locked(folder: Path) -> tuple[Path, int]:
    """A new temporary file that no sweep removes while its descriptor is open."""
    while True:
        temporary = folder / f".packing-{secrets.token_hex(8)}"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        lock_if_possible(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return temporary, fd
        os.close(fd)  # swept between being made and being locked


def _allocate(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        os.ftruncate(fd, nbytes)


def lock_if_possible(fd: int, operation: int) -> bool:
    """Whether the lock was taken; some network file systems have none, or none for readers (EBADF), and nothing
    depends on it there."""
    try:
        fcntl.flock(fd, operation)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.EWOULDBLOCK):
            return False
        raise
    return True


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # folders of some file systems cannot be synced
            raise
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def sweep_temporaries(folder: Path) -> int:
    """Remove files that killed processes left half written; returns their bytes."""
    freed = 0
    for path in folder.iterdir():
        if not TEMPORARY.fullmatch(path.name):
            continue
        try:
            fd = _open_any(path)
        except (FileNotFoundError, PermissionError):
            continue  # finished by its owner meanwhile, or somebody else's
        try:
            if lock_if_possible(fd, fcntl.LOCK_EX | fcntl.LOCK_NB):
                freed += os.fstat(fd).st_size
                _remove(path)
        finally:
            os.close(fd)
    return freed


def _open_any(path: Path) -> int:
    """For writing, as locks of some network file systems need it; one that was complete already is read-only."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def write_error(error: OSError, path: Path, nbytes: int | None = None, *, in_cache: bool = True) -> PackError:
    """A failed write, as the user can act on it. A path that is not `in_cache` was chosen by the user."""
    need = "" if nbytes is None else f" ({nbytes / 1e6:.0f} MB needed)"
    elsewhere = "set COREMILL_CACHE to a folder" if in_cache else "choose a place"
    room = f"free some space (`coremill cache prune`), or {elsewhere} on a larger disk"
    remedies = {
        errno.ENOSPC: room,
        errno.EDQUOT: f"your disk quota is used up: {room}",
        errno.EFBIG: "the limit on file sizes is too small (`ulimit -f`)",
    }
    remedy = remedies.get(error.errno or 0, f"{elsewhere} you can write to")
    return PackError(f"{path}: cannot be written{need}: {error.strerror}; {remedy}")
