"""Reading what the kernel says about this machine, from `/` or from a tree that looks like it.

Every fact about the host is read through one `HostFiles`, so that a test can describe any machine as a folder.
A file that is missing or unreadable is None: containers hide parts of /proc and /sys, and what to assume then
is for the caller to say.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_CPU_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The kernel's list format: "0-3,8" -> (0, 1, 2, 3, 8). Parts that are not ranges are left out."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        found = _CPU_RANGE.fullmatch(part.strip())
        if found:
            first = int(found[1])
            cpus.update(range(first, int(found[2] or first) + 1))
    return tuple(sorted(cpus))


def format_cpu_list(cpus: tuple[int, ...]) -> str:
    """The inverse of parse_cpu_list for ascending numbers: (0, 1, 2, 3, 8) -> "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


class HostFiles:
    """Files of /proc and /sys below `root`."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = Path(root)

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """Content without surrounding white space. None when it cannot be read."""
        try:
            # Paths inside cgroups may hold any bytes.
            return self.path(name).read_text(encoding="utf-8", errors="surrogateescape").strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """The integer a file holds. None also for words such as "max"."""
        text = self.text(name)
        try:
            return None if text is None else int(text)
        except ValueError:
            return None

    def cpus(self, name: str) -> tuple[int, ...] | None:
        """The CPU list a file holds. None when it is missing or empty."""
        text = self.text(name)
        return parse_cpu_list(text) or None if text else None

    def numbered(self, folder: str, prefix: str) -> tuple[int, ...]:
        """The numbers n of the entries `<prefix>n` in a folder, ascending."""
        try:
            names = os.listdir(self.path(folder))
        except OSError:
            return ()
        ends = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
        return tuple(sorted(int(end) for end in ends if end.isdecimal()))

    def table(self, name: str, separator: str | None = None) -> dict[str, str]:
        """Lines "key<separator>value" as a dict, as in /proc/meminfo (":") and memory.stat (blank)."""
        pairs = (line.split(separator, 1) for line in (self.text(name) or "").splitlines())
        return {pair[0].strip(): pair[1].strip() for pair in pairs if len(pair) == 2}
