"""Calls at given times, for a thread that sleeps in between. Not thread-safe, and without a clock of its own."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Timer:
    """One call to come. call: None once it has been made or cancelled."""

    __slots__ = ("call", "when")

    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when = when
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Keeps nothing of the call alive. From any thread; one that is being made goes on."""
        self.call = None


class Timers:
    """Calls in the order of their times. Cancelled ones are forgotten in time, at most half of what is kept."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._num_added = 0
        self._look_at = 64  # entries at which cancelled ones are looked for

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, timer: Timer) -> None:
        self._num_added += 1
        heapq.heappush(self._heap, (timer.when, self._num_added, timer))
        if len(self._heap) >= self._look_at:
            self._heap = [entry for entry in self._heap if entry[2].call is not None]
            heapq.heapify(self._heap)
            self._look_at = max(64, 2 * len(self._heap))

    def seconds_left(self, now: float) -> float | None:
        """Until the next call; None when there is none."""
        while self._heap and self._heap[0][2].call is None:
            heapq.heappop(self._heap)
        return max(0.0, self._heap[0][0] - now) if self._heap else None

    def due(self, now: float) -> list[Callable[[], None]]:
        """The calls to be made at `now`."""
        calls = []
        while self._heap and self._heap[0][0] <= now:
            timer = heapq.heappop(self._heap)[2]
            if timer.call is not None:
                calls.append(timer.call)
                timer.call = None
        return calls
