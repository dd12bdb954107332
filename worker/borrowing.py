"""How many of the cores that other workers lend make this one's steps faster: found by trying, since neighbours,
caches and the size of the model decide it. Durations come from outside; there is no clock here.

Steps are of like kind when they have about as many rows. Each kind climbs a ladder of rungs (no borrowed core, then as
many as make twice, four times ... the threads): a rung is tried for some steps when the one below is the best so far,
and stays only if it is clearly faster. Now and then its neighbours are tried again.
"""

from __future__ import annotations

from collections import deque
from statistics import median

# Steps of a rung before it is judged, and those that are remembered: one that was disturbed must not decide.
TRIES, REMEMBERED = 3, 7
# A rung must take less than this share of the time of the one below, or its cores are left alone.
WORTHWHILE = 0.95
# Steps until the neighbours of the best rung are tried again; doubled each time that changes nothing.
FIRST_RETRY, LAST_RETRY = 32, 1024


class Borrowing:
    """num_own: threads that the worker has anyway. cores: those lent to it now."""

    def __init__(self, num_own: int) -> None:
        self._num_own = num_own
        self.cores: tuple[int, ...] = ()
        self._measured: tuple[int, ...] = ()  # the cores that what is known is about
        self._rungs = [0]
        self._kinds: dict[int, _Ladder] = {}

    def offer(self, cores: tuple[int, ...]) -> None:
        """These are lent from now on, nearest first; () when none are any more."""
        self.cores = cores
        if cores and cores != self._measured:
            self._measured, self._rungs = cores, _rungs(self._num_own, len(cores))
            self._kinds = {rows: ladder.without_borrowed() for rows, ladder in self._kinds.items()}

    def choose(self, num_rows: int) -> tuple[int, ...]:
        """The cores to use in a step of so many rows."""
        if not self.cores:
            return ()
        ladder = self._kinds.setdefault(num_rows.bit_length(), _Ladder())
        return self.cores[: self._rungs[ladder.choose(len(self._rungs))]]

    def observe(self, num_rows: int, num_borrowed: int, seconds: float) -> None:
        """How long a step of so many rows took, on so many borrowed cores, while some were lent."""
        if self.cores:
            self._kinds[num_rows.bit_length()].observe(self._rungs.index(num_borrowed), seconds / num_rows)


def _rungs(num_own: int, num_lent: int) -> list[int]:
    """Numbers of borrowed cores worth trying, ascending, all of them last."""
    rungs, threads = [], num_own
    while threads - num_own < num_lent:
        rungs.append(threads - num_own)
        threads *= 2
    return [*rungs, num_lent]


class _Ladder:
    """What is known of one kind of steps: seconds a row, by rung."""

    def __init__(self, seconds: dict[int, deque[float]] | None = None) -> None:
        self._seconds = seconds or {}
        self._best, self._since_retry, self._retry = 0, 0, FIRST_RETRY

    def without_borrowed(self) -> _Ladder:
        return _Ladder({0: self._seconds[0]} if 0 in self._seconds else {})

    def observe(self, rung: int, seconds: float) -> None:
        self._seconds.setdefault(rung, deque(maxlen=REMEMBERED)).append(seconds)

    def choose(self, num_rungs: int) -> int:
        # With help before without: what ends within these few steps has probably gained.
        for rung in (1, 0):
            if self._is_unknown(rung):
                return rung
        best = 0
        for rung in range(1, num_rungs):
            if self._is_unknown(rung):
                return rung
            if self._median(rung) >= WORTHWHILE * self._median(best):
                break
            best = rung
        self._settle(best)
        return best

    def _settle(self, best: int) -> None:
        if best != self._best:
            self._best, self._since_retry, self._retry = best, 0, FIRST_RETRY
        self._since_retry += 1
        if self._since_retry >= self._retry:
            self._since_retry, self._retry = 0, min(2 * self._retry, LAST_RETRY)
            for neighbour in (best - 1, best + 1):
                self._seconds.pop(neighbour, None)

    def _is_unknown(self, rung: int) -> bool:
        return len(self._seconds.get(rung, ())) < TRIES

    def _median(self, rung: int) -> float:
        return median(self._seconds[rung])
