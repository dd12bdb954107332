"""Progress of what is usually done at once, and is told only when it is not."""

from __future__ import annotations

import time
from collections.abc import Callable

Stage = Callable[[str, int, int], None]
_NOTICEABLE_SECONDS, _BETWEEN_SECONDS = 1.0, 0.25
# Calls between two looks at the clock.
_CALLS = 1024


class Slowly:
    """Call it as often as you like with (done, total); `tell` hears of it from the second second on.

    tell: PlainReporter.stage or the like; None: nobody wants to know.
    """

    def __init__(self, stage: str, tell: Stage | None) -> None:
        self._stage, self._tell = stage, tell
        self._next = time.monotonic() + _NOTICEABLE_SECONDS
        self._num_calls = 0

    def __call__(self, done: int, total: int) -> None:
        self._num_calls += 1
        if self._tell is None or self._num_calls % _CALLS:
            return
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _BETWEEN_SECONDS
            self._tell(self._stage, done, total)
