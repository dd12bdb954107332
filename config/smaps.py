"""Memory of a process, as the kernel accounts for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. rss counts shared pages in full; pss shares them out among the processes that map them.

    weights, arena and private split pss: the pack's mapping, the KV arena's, everything else.
    """

    rss: int
    pss: int
    weights: int
    arena: int
    private: int


def measure_memory(pack_path: str, arena_name: str, pid: int | None = None) -> Memory:
    """Memory of a process of this user, None: this one, from /proc/PID/smaps. arena_name: what the arena's memfd was
    called. OSError when the process is gone or is somebody else's."""
    with open(f"/proc/{'self' if pid is None else pid}/smaps", errors="surrogateescape") as file:
        return split_memory(file, pack_path, f"/memfd:{arena_name} (deleted)")


def split_memory(smaps: Iterable[str], weights_path: str, arena_path: str) -> Memory:
    """Sums over the lines of a smaps file."""
    rss = pss = weights = arena = 0
    path = ""
    for line in smaps:
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):  # "start-end perms offset dev inode   path"
            columns = rest.rstrip("\n").split(None, 4)
            path = columns[4] if len(columns) > 4 else ""
        elif name == "Rss:":
            rss += int(rest.split()[0]) * 1024
        elif name == "Pss:":
            size = int(rest.split()[0]) * 1024
            pss += size
            if path == weights_path:
                weights += size
            elif path == arena_path:
                arena += size
    return Memory(rss, pss, weights, arena, pss - weights - arena)
