"""The end of a file on a clock of our own: a step takes as long as reading the weights, and a bit for each of its rows.

What is measured is what `coremill bench tail` measures on a real machine.
"""

from __future__ import annotations

import heapq
import random
from itertools import count

import pytest

# Of a step, in rows.
WEIGHTS = 8
MIXES = {"uneven": [5, 20, 60, 200], "one giant in ten": [20] * 9 + [300], "anything": list(range(1, 250))}


class Clocked:
    """Runs all rows of a world. Messages of a step are heard when its time has passed.

    now: the makespan in the end. work: time that workers computed. spans: (begin, end, sequences that each worker
    held). stay: of each row, time since it first began.
    """

    def __init__(self, world) -> None:
        world.scheduler.stop_ids = ()  # each row has the length that is known of it
        self.world = world
        self.now = self.work = 0
        self.spans: list[tuple[int, int, list[int]]] = []
        self.stay: dict[int, int] = {}
        self._begun: dict[int, int] = {}
        self._ends: list[tuple[int, int, int]] = []  # heap of (time, number, worker) of the steps that run
        self._numbers = count()
        for index in world.workers:
            world.deliver(index)  # Ready
        self._begin_steps()
        while self._ends:
            self._next()
        world.run()

    def _begin_steps(self) -> None:
        """Everybody who does nothing hears what there is, and begins a step if there is something to run."""
        running = {worker for _, _, worker in self._ends}
        for index, worker in self.world.workers.items():
            if index in running:
                continue
            worker.hear(1_000_000)
            before = worker.counters["step_rows"]
            stepped = worker.step()
            if stepped or worker.outbox:
                seconds = WEIGHTS + worker.counters["step_rows"] - before if stepped else 0
                self.work += seconds
                heapq.heappush(self._ends, (self.now + seconds, next(self._numbers), index))
        for lease in self._leases():
            self._begun.setdefault(lease.sequence.ticket, self.now)

    def _next(self) -> None:
        end, _, index = heapq.heappop(self._ends)
        if end > self.now:
            self.spans.append((self.now, end, [len(slot.leases) for slot in self.world.scheduler.slots]))
            self.now = end
        finished = set(self.world.results)
        self.world.deliver(index)
        for ticket in self.world.results.keys() - finished:
            self.stay[ticket] = self.now - self._begun[ticket]
        self._begin_steps()

    def _leases(self):
        return [lease for slot in self.world.scheduler.slots for lease in slot.leases.values()]

    def idle_at_the_end(self, worker: int) -> int:
        """Time of the last tenth in which it held nothing and another held two or more."""
        tail = self.now - self.now // 10
        return sum(
            end - max(begin, tail)
            for begin, end, held in self.spans
            if end > tail and held[worker] == 0 and max(held) >= 2
        )


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("num_workers", "max_active"), [(2, 4), (2, 16), (4, 4), (8, 2)])
def test_40_uneven_rows(world, sim, num_workers, max_active, mix):
    """The makespan is within 10 % of the larger of all work over workers and the longest row in its batch; nobody
    idles in more than a fifth of the last tenth while another holds two."""
    for seed in range(3):
        rng = random.Random(seed)
        made = world(num_workers=num_workers, max_active=max_active, num_blocks=600, step_tokens=64)
        for row in range(40):
            prompt = tuple(rng.randrange(1, sim.POISON) for _ in range(8))
            made.submit(sim.SequenceRequest(str(row), prompt, rng.choice(MIXES[mix]), seed=rng.randrange(1 << 60)))
        run = Clocked(made)
        least = max(run.work / num_workers, max(run.stay.values()))
        assert least <= run.now <= 1.1 * least, (seed, run.now, least)
        for worker in range(num_workers):
            assert run.idle_at_the_end(worker) <= run.now / 10 / 5, (seed, worker, run.spans[-20:])
        assert made.scheduler.counts["recomputed_tokens"] == 0
