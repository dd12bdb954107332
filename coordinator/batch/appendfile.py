"""A file that only grows by whole lines, in one run's hands at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading

from coremill.config.errors import RunError

IRREGULAR = "{} is not a regular file: a run must be able to resume from it"


class AppendFile:
    """A file that grows by whole lines. Locked against other runs for as long as it is open."""

    def __init__(self, path: str, *, identity_refused: tuple[int, int] | None = None) -> None:
        self.path = path
        self.dirty = False
        self._lock = threading.Lock()  # held while the size changes: another thread compares it
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self.created = not os.path.lexists(path)
            # Prompts and answers are nobody else's business; a stricter umask takes away more.
            self.fd = os.open(path, flags | (os.O_EXCL if self.created else 0), 0o600)
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror}") from None
        try:
            self._check(identity_refused)
        except BaseException:
            os.close(self.fd)
            raise

    def _check(self, identity_refused: tuple[int, int] | None) -> None:
        status = os.fstat(self.fd)
        self.identity = (status.st_dev, status.st_ino)
        if not stat.S_ISREG(status.st_mode):
            raise RunError(IRREGULAR.format(self.path))
        if self.identity == identity_refused:
            raise RunError(f"{self.path} is the input itself: choose another name")
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another run is writing {self.path}: wait for it or choose another name") from None
        except OSError as error:
            raise RunError(f"cannot lock {self.path}: {error.strerror}") from None
        self.size = os.fstat(self.fd).st_size
        self.check()

    def append(self, data: bytes) -> None:
        """All lines of `data` or, with a RunError, as many of them as could be written whole."""
        rest = memoryview(data)
        with self._lock:
            try:
                while rest:
                    rest = rest[os.write(self.fd, rest) :]
            except OSError as error:
                self.size += data.rfind(b"\n", 0, len(data) - len(rest)) + 1
                with contextlib.suppress(OSError):  # on a broken disk the next run repairs the tail
                    os.ftruncate(self.fd, self.size)
                raise RunError(
                    f"cannot write {self.path}: {error.strerror}. What is written so far is complete; "
                    "once there is room the same command goes on from there"
                ) from error
            self.size += len(data)
            self.dirty = True

    def cut(self, size: int) -> None:
        with self._lock:
            if size != self.size:
                os.ftruncate(self.fd, size)
                self.size = size
                self.dirty = True

    def check(self) -> None:
        """RunError when somebody else has removed, replaced or changed the file."""
        with self._lock:
            found, expected = os.fstat(self.fd).st_size, self.size
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            problem = "was removed or renamed"
        else:
            if (status.st_dev, status.st_ino) != self.identity:
                problem = "was replaced by another file"
            elif found != expected:
                problem = f"has {found} bytes where {expected} were written: somebody else changed it"
            else:
                return
        raise RunError(f"{self.path} {problem} during the run; rows that are not in it now are run by the next run")

    def sync(self) -> None:
        if self.dirty:
            self.dirty = False
            os.fsync(self.fd)

    def close(self) -> None:
        os.close(self.fd)
