"""CURVE keys for sockets that can be reached over the network: without a listed key nobody gets in.

    FOLDER (0700)
        server.secret (0600)   server.public       the coordinator's; clients need the public one
        client.secret (0600)                       a client's
        clients/*.public                           who may come: one key a file, read again for each newcomer

Each file holds one key of 40 characters (Z85). A client elsewhere has a folder with server.public and client.secret.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from coremill.config.errors import ConfigError

_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.%\w]+\]|[\w.\-]+|\*):(\d{1,5})")


class ServerKeys(NamedTuple):
    """The coordinator's secret key, and the folder of those who may come."""

    secret: bytes
    clients: Path


class ClientKeys(NamedTuple):
    """A client's keys, and the one it expects the coordinator to have."""

    secret: bytes
    public: bytes
    server: bytes


def make_keys(folder: str | os.PathLike[str]) -> list[Path]:
    """Keys for a coordinator and a first client; the new files. ConfigError when the folder holds any already."""
    base = Path(folder)
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        present = [entry.name for entry in base.iterdir()]
        if present:
            raise ConfigError(f"--keys {base} is not empty (it has {min(present)}): keys are made in a new folder")
        base.chmod(0o700)
        (base / "clients").mkdir(mode=0o700)
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return [
            _write(base / "server.secret", server_secret),
            _write(base / "server.public", server_public),
            _write(base / "client.secret", client_secret),
            _write(base / "clients" / "client.public", client_public),
        ]
    except OSError as error:
        raise ConfigError(f"--keys {error.filename or base}: {error.strerror or error}") from None


def _write(path: Path, key: bytes) -> Path:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644 if path.suffix == ".public" else 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(key + b"\n")
    return path


def server_keys(folder: str | os.PathLike[str]) -> ServerKeys:
    """ConfigError when they are not there, or not as secret as they must be."""
    base = Path(folder)
    keys = ServerKeys(_read_secret(base / "server.secret"), base / "clients")
    if not keys.clients.is_dir():
        raise ConfigError(f"{keys.clients} is missing: it is the folder of the keys that may come")
    return keys


def client_keys(folder: str | os.PathLike[str]) -> ClientKeys:
    base = Path(folder)
    secret = _read_secret(base / "client.secret")
    return ClientKeys(secret, zmq.curve_public(secret), _read(base / "server.public"))


def listed(keys: ServerKeys, key: bytes) -> bool:
    """Whether this public key (Z85) may come. A file that cannot be read lists nobody."""
    for path in sorted(keys.clients.glob("*.public")):
        try:
            if _read(path) == key:
                return True
        except ConfigError:
            continue
    return False


def _read_secret(path: Path) -> bytes:
    key = _read(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(f"{path} has mode {mode:04o}: others can read it. Make new keys, and keep them at 0600")
    return key


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            key = file.read(100).strip()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error} (`coremill up --make-keys --keys FOLDER`)") from None
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{path} does not hold a key of 40 characters (Z85)")
    return key


def check_tcp(address: Any, name: str) -> str:
    """tcp://HOST:PORT. ConfigError names what it is."""
    found = _TCP.fullmatch(address) if isinstance(address, str) else None
    if found is None or int(found[2]) > 65535:
        raise ConfigError(f"{name} is {address!r}: it must be tcp://HOST:PORT")
    return address


class Gate:
    """Lets listed keys in (ZAP, rfc.zeromq.org/spec/27). `socket` must be polled; it exists before any key comes."""

    def __init__(self, context: zmq.Context[Any], keys: ServerKeys) -> None:
        self._keys = keys
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """The questions that are there."""
        while True:
            try:
                version, number, _, _, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            welcome = mechanism == b"CURVE" and listed(self._keys, z85.encode(credentials[0]))
            said = [b"200", b"OK"] if welcome else [b"400", b"the key is not listed"]
            self.socket.send_multipart([version, number, *said, b"", b""])
