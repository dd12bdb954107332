"""Bounds what is between the input and the files: rows in flight, and finished rows that wait for their turn."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coremill.coordinator.batch.feeder import Finished
    from coremill.coordinator.batch.results import Row


class Window:
    """A budget of rows and of bytes. A row alone is always admitted, however large."""

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._rows = self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    def acquire(self, cost: int) -> bool:
        """Waits until a row of `cost` bytes fits. False once the window is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._rows == 0 or self._fits(cost))
            if self._closed:
                return False
            self._rows += 1
            self._bytes += cost
            return True

    def release(self, cost: int) -> None:
        with self._changed:
            self._rows -= 1
            self._bytes -= cost
            self._changed.notify()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Nobody is admitted, or kept waiting, any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _fits(self, cost: int) -> bool:
        return self._rows < self._max_rows and self._bytes + cost <= self._max_bytes


class InputOrder:
    """Holds finished rows back until all rows before them are finished. Bounded by the window, which a row that
    is held back has not left."""

    def __init__(self) -> None:
        self._next = 0
        self._held: list[tuple[int, Finished]] = []

    def has_given(self, row: Row) -> bool:
        return row.ordinal < self._next

    def take(self, finished: Iterable[Finished]) -> Iterator[Finished]:
        """Those of the rows so far whose turn has come."""
        for item in finished:
            heapq.heappush(self._held, (item.row.ordinal, item))
        while self._held and self._held[0][0] == self._next:
            self._next += 1
            yield heapq.heappop(self._held)[1]
