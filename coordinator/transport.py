"""The coordinator's end of the wire: one ROUTER on a socket file in a private folder.

The folder exists only while workers are expected: it is made before one is started and removed when all have said
Hello, since connections outlive the file they came through (but not the listener, which stays until the last of
them is gone). What a killed coordinator leaves behind is swept by the next one: a folder is in use exactly while
somebody holds a lock on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import zmq

from coremill.config.errors import UnsupportedHostError
from coremill.config.messages import Message, decode, encode

_PREFIX = "coremill-"
_SOCKET = "s"
# sun_path of a Unix socket holds 108 bytes, the last of them NUL.
MAX_SOCKET_PATH = 107


def base_folder() -> Path:
    """Where private folders are made: XDG_RUNTIME_DIR when it is usable, else the temporary folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and os.access(runtime, os.W_OK | os.X_OK) and _short_enough(Path(runtime)):
        return Path(runtime)
    import tempfile

    temporary = Path(tempfile.gettempdir())
    if not _short_enough(temporary):
        raise UnsupportedHostError(
            f"the temporary folder {temporary} has too long a name for a socket in it ({MAX_SOCKET_PATH} bytes); "
            "set XDG_RUNTIME_DIR or TMPDIR to a shorter one"
        )
    return temporary


def _short_enough(base: Path) -> bool:
    longest = base / f"{_PREFIX}{'0' * 16}" / _SOCKET
    return len(os.fsencode(longest)) <= MAX_SOCKET_PATH


class PrivateFolder:
    """A new folder of mode 0700 that nobody sweeps while this process holds it."""

    def __init__(self, base: Path) -> None:
        while True:
            self.path = base / f"{_PREFIX}{secrets.token_hex(8)}"
            os.mkdir(self.path, 0o700)
            # Until it is locked somebody may take it for a stale one.
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                if os.path.samestat(os.stat(self.path), os.fstat(self._lock)):
                    return
            except FileNotFoundError:
                pass
            os.close(self._lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def private_folders(base: Path) -> list[Path]:
    """Folders that coordinators of this user have made there, stale ones too."""
    found = []
    for entry in base.glob(f"{_PREFIX}{'[0-9a-f]' * 16}"):
        with contextlib.suppress(OSError):  # removed meanwhile
            status = entry.lstat()
            mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if mine and stat.S_IMODE(status.st_mode) == 0o700:
                found.append(entry)
    return found


def is_held(folder: Path) -> bool:
    """Whether somebody who lives has the folder."""
    return _unless_held(folder, fcntl.LOCK_SH, lambda folder: None) is False


def sweep(base: Path) -> list[Path]:
    """Remove folders of coordinators that are gone; returns them."""
    return [entry for entry in private_folders(base) if _unless_held(entry, fcntl.LOCK_EX, _remove_tree)]


def _remove_tree(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _unless_held(folder: Path, lock: int, call: Callable[[Path], None]) -> bool | None:
    """Calls with the folder while nobody can take it: True. False when somebody has it, None when it is not there."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, lock | fcntl.LOCK_NB)
        call(folder)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


class Transport:
    """Messages to and from workers by routing id. Used by one thread at a time."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._folder: PrivateFolder | None = None
        self._endpoint = ""  # of the open door
        self._users: dict[str, int] = {}  # workers by the endpoint they were told

    def open_door(self) -> str:
        """The address for one worker that is about to start; `leave` it when the worker has ended."""
        if self._folder is None:
            base = base_folder()
            sweep(base)
            self._folder = PrivateFolder(base)
            self._endpoint = f"ipc://{self._folder.path / _SOCKET}"
            self.socket.bind(self._endpoint)
        self._users[self._endpoint] = self._users.get(self._endpoint, 0) + 1
        return self._endpoint

    def close_door(self) -> None:
        """Everybody expected has connected: leave nothing in the file system."""
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
            self._drop_if_unused(self._endpoint)

    def leave(self, endpoint: str) -> None:
        """The worker that was given this address has ended."""
        self._users[endpoint] -= 1
        if self._folder is None or endpoint != self._endpoint:
            self._drop_if_unused(endpoint)

    def _drop_if_unused(self, endpoint: str) -> None:
        if not self._users[endpoint]:
            del self._users[endpoint]
            self.socket.unbind(endpoint)

    def send(self, identity: bytes, message: Message) -> bool:
        """False when the worker is not connected (any more): its death is reported by other means."""
        try:
            self.socket.send_multipart((identity, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def receive(self) -> tuple[bytes, Message] | None:
        """The next message, or None when there is none yet."""
        try:
            identity, data = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return identity, decode(data)

    def close(self) -> None:
        self.close_door()
        self.socket.close()
        self._context.term()
