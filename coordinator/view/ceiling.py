"""What this machine reads from memory at best, remembered in the cache folder.

`coremill doctor` and `coremill bench` measure it on an idle machine; while a model runs it cannot be measured. A cache
folder may be shared by machines, so each has a file of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from coremill.config.cputimes import cpu_name
from coremill.config.errors import PackError
from coremill.config.hostfiles import HostFiles
from coremill.native.cache import cache_folder


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Bytes per second that one core reads, and all `num_cores` together; measured: seconds since the epoch."""

    read_one: float
    read_all: float
    num_cores: int
    measured: float

    def of_cores(self, count: int) -> float:
        """What `count` cores read together at best. For more of them than were measured: in proportion."""
        if count > self.num_cores:
            return self.read_all * count / self.num_cores
        return min(self.read_one * count, self.read_all)


def save_ceiling(ceiling: Ceiling, *, disturbed: bool) -> bool:
    """False when it is not kept: the folder cannot be written, or the machine was busy (disturbed), which can only make
    a figure too low: then it must be higher than what is known."""
    try:
        path = _path()
        known = load_ceiling()
        if disturbed and (known is None or (known.num_cores, known.read_all) >= (ceiling.num_cores, ceiling.read_all)):
            return False
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        beside.write_text(json.dumps(asdict(ceiling)) + "\n")
        beside.replace(path)
    except (OSError, PackError):
        return False
    return True


def load_ceiling() -> Ceiling | None:
    """None: not measured on this machine."""
    try:
        found = Ceiling(**json.loads(_path().read_bytes()))
        sizes = (found.read_one, found.read_all, found.num_cores)
        return found if min(sizes) > 0 else None
    except (OSError, PackError, ValueError, TypeError):
        return None


def measured_now(read_one: float, read_all: float, num_cores: int) -> Ceiling:
    return Ceiling(read_one, read_all, num_cores, time.time())


def _path() -> Path:
    """A CPU of this name in a machine of this name, with so many CPUs online."""
    files = HostFiles()
    machine = (files.text("/etc/machine-id") or platform.node(), cpu_name(files), os.cpu_count())
    digest = hashlib.sha256(repr(machine).encode(errors="replace")).hexdigest()[:16]
    return cache_folder() / "machines" / f"{digest}.json"
