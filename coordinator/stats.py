"""What each worker's place has done, across the processes that have filled it.

The counters live in shared pages which workers write and we read; memory is what a worker last said of itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coremill.config.counters import PAGE_NAME, CounterPage, create_page
from coremill.config.messages import Measured, Ready
from coremill.config.topology import CoreGroup


@dataclass(slots=True)
class Place:
    """One core group and whoever works there. state: starting, ready, retired or stopped. has_died: the last worker
    died, other than asked to, and nobody has taken its place; num_restarts counts those who did."""

    group: CoreGroup
    page_fd: int
    counters: CounterPage
    pid: int | None = None
    state: str = "starting"
    has_died: bool = False
    num_restarts: int = 0
    last_death: str | None = None
    ready: Ready | None = None
    memory: Measured | None = None
    _final: dict[str, int] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        return self._final or self.counters.snapshot()

    def close(self) -> None:
        """Keep the last numbers, let the page go."""
        self._final = self.counters.snapshot()
        self.counters.close()
        os.close(self.page_fd)


class Places:
    """The places of one engine, by worker index."""

    def __init__(self, groups: Sequence[CoreGroup]) -> None:
        self._places = []
        for index, group in enumerate(groups):
            fd = create_page(f"{PAGE_NAME}{index}")
            self._places.append(Place(group, fd, CounterPage(fd)))

    def __getitem__(self, index: int) -> Place:
        return self._places[index]

    def __iter__(self):
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def close(self) -> None:
        for place in self._places:
            place.close()

    def report(self) -> list[dict[str, Any]]:
        """One dict per worker, with names that scripts rely on; sizes in bytes."""
        return [self._report_one(index, place) for index, place in enumerate(self._places)]

    def _report_one(self, index: int, place: Place) -> dict[str, Any]:
        counts = place.counts()
        steps = counts["steps"]
        memory, ready = place.memory, place.ready
        return {
            "worker": index,
            "pid": place.pid,
            "cores": list(place.group.cores),
            "state": place.state,
            "restarts": place.num_restarts,
            "last_death": place.last_death,
            "isa": ready.isa if ready else None,
            "active": counts["active"] if place.state == "ready" else 0,
            "prefill_tokens": counts["prefill_tokens"],
            "decode_tokens": counts["decode_tokens"],
            "steps": steps,
            "busy_seconds": counts["busy_ns"] * 1e-9,
            "borrowed_steps": counts["borrowed_steps"],
            "mean_batch": counts["step_sequences"] / steps if steps else 0.0,
            "mean_rows": counts["step_rows"] / steps if steps else 0.0,
            "scratch_bytes": ready.scratch_bytes if ready else None,
            "rss_bytes": memory.rss if memory else None,
            "pss_bytes": memory.pss if memory else None,
            "pss_weights_bytes": memory.weights if memory else None,
            "pss_arena_bytes": memory.arena if memory else None,
            "pss_private_bytes": memory.private if memory else None,
        }

    def profiles(self) -> list[list[tuple[str, str, int, float]]]:
        """Per worker: (label, kind, calls, seconds) of each operation, when profiling."""
        return [list(place.memory.profile) if place.memory else [] for place in self._places]
