"""The rows of a workload file, as `coremill run` counts them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, content) of each line that is not blank. Only LF ends one: a JSON string may hold what Unicode calls a
    line separator."""
    with open(path, encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line
