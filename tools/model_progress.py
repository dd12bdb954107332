"""Shows what fetching, hashing and packing a model are doing, once they take long enough to be noticed."""

from __future__ import annotations

import sys
import time
from typing import Any

# Below this a warm or small model shows nothing at all.
_NOTICEABLE_SECONDS = 0.3


class ModelProgress:
    """A `progress` callable for native.cache: a bar on a terminal, else one line per stage on stderr.

    with ModelProgress() as progress: ensure_pack(model, progress=progress)
    """

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._stage = ""
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if total and time.monotonic() - self._begin < _NOTICEABLE_SECONDS:
            return
        if not sys.stderr.isatty():
            if stage != self._stage:
                print(f"coremill: {stage}", file=sys.stderr, flush=True)
        elif self._bar is None or stage != self._stage:
            self._start_bar(stage)
        self._stage = stage
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total or None)

    def _start_bar(self, stage: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        else:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(stage, total=None)

    def __enter__(self) -> ModelProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
