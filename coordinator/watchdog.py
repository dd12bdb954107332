"""Tells workers that stand still from those that are only slow. Pure: clock and signs of life are given to it.

A worker that has work shows that it lives by the number of operations native has completed, which stands in shared
memory, and by what it says. When neither has moved for half of `patience` seconds it is asked to say something (a
worker may rightly have nothing to compute, while it waits for blocks); when it has not answered after the whole of
it, it is stuck.

Only time in which somebody looked counts. When the whole machine sleeps, or everything here was stopped and goes on,
the clock jumps, and a jump is as good as one look.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

# Longest time between two looks while somebody works, in seconds.
LOOK_SECONDS = 1.0
# A worker that is loading shows few signs of life.
START_FACTOR = 6


@dataclass(slots=True)
class _Watched:
    signs: tuple[int, ...]
    quiet: float = 0.0
    asked: bool = False


@dataclass(slots=True)
class Verdict:
    """Who should be asked whether it lives, and who is stuck."""

    ask: list[Hashable] = field(default_factory=list)
    stuck: list[Hashable] = field(default_factory=list)


class Watchdog:
    """patience: seconds without any sign of life after which a worker that has work is stuck."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.interval = min(LOOK_SECONDS, patience / 8)
        self._watched: dict[Hashable, _Watched] = {}
        self._last_look = 0.0

    def due(self, now: float) -> bool:
        """Whether it is time to look; more often costs and tells nothing."""
        return now - self._last_look >= self.interval

    def look(self, now: float, busy: Mapping[Hashable, tuple[float, tuple[int, ...]]]) -> Verdict:
        """busy: of each worker that has work, a factor for its patience and its signs of life."""
        elapsed = min(now - self._last_look, 2 * self.interval)
        self._last_look = now
        verdict = Verdict()
        before, self._watched = self._watched, {}
        for who, (factor, signs) in busy.items():
            watched = before.get(who)
            if watched is None or watched.signs != signs:
                watched = _Watched(signs)
            else:
                watched.quiet += elapsed
            self._watched[who] = watched
            if watched.quiet >= self.patience * factor:
                verdict.stuck.append(who)
            elif watched.quiet >= self.patience * factor / 2 and not watched.asked:
                watched.asked = True
                verdict.ask.append(who)
        return verdict
