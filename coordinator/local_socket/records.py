"""Who listens: a small record beside each socket, for those who look for a running coordinator."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from coremill.config.errors import ConfigError, EngineClosedError
from coremill.coordinator.transport import base_folder, is_held, private_folders

Kind = Literal["run", "up"]

SOCKET = "s"
_RECORD = "record"


@dataclass(frozen=True, slots=True)
class Record:
    """A running coordinator: its process, what it does ("run", "up"), its model, when it began (seconds
    since the epoch) and where it listens, "ipc://...": what LocalClient takes."""

    pid: int
    kind: Kind
    model: str
    started: float
    address: str


def running() -> list[Record]:
    """The live coordinators of this user that listen, oldest first."""
    found: list[Record] = []
    for place in _places():
        for folder in private_folders(place):
            record = _read(folder) if is_held(folder) else None
            if record is not None:
                found.append(record)
    return sorted(found, key=lambda record: (record.started, record.pid))


def _places() -> list[Path]:
    """Where coordinators of this user may be: they need not have our environment (a service, another login)."""
    places = [base_folder(), Path(f"/run/user/{os.getuid()}"), Path(tempfile.gettempdir())]
    return [place for place in dict.fromkeys(places) if place.is_dir()]


def _read(folder: Path) -> Record | None:
    """None for a folder for workers, one that is being made, or one that a forked child holds for a dead owner."""
    try:
        record = Record(**json.loads((folder / _RECORD).read_bytes()))
        os.kill(record.pid, 0)
    except (OSError, ValueError, TypeError):
        return None
    return record


def write(record: Record, folder: Path) -> None:
    unfinished = folder / f"{_RECORD}.new"
    unfinished.write_text(json.dumps(asdict(record)))
    unfinished.rename(folder / _RECORD)


def check_address(address: str) -> None:
    """Only a socket in a private folder of our own: in anybody else's another user may listen.

    ConfigError when it is not that, EngineClosedError when nothing is there.
    """
    scheme, _, path = address.partition("://") if isinstance(address, str) else ("", "", "")
    if scheme != "ipc" or not os.path.isabs(path):
        raise ConfigError(f"address is {address!r}: it must be ipc:// and an absolute path, or tcp://HOST:PORT")
    folder = Path(path).parent
    if not os.path.lexists(path):
        raise EngineClosedError(f"nobody listens at {address}: the coordinator has ended")
    if folder not in private_folders(folder.parent):
        raise ConfigError(f"address is {address!r}: {folder} is not a private folder of this user")
