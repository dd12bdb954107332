"""Who runs where, and on whose blocks: the half of the scheduler that decides. The other half, which listens, is
coordinator/scheduler.py.

When blocks are short      cached ones go first; then a sequence that is paused loses its last ones; then the least
                           entitled one that runs is paused
When priorities differ     only the highest of them runs; who has less is paused and keeps its blocks
When a worker has room     the next of the line, if it fits; what another is just computing is waited for
When a worker idles        it gets half of what the busiest has more; with nothing to get it lends its cores
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from coremill.config.messages import Begin, Extend, Release, Stop
from coremill.coordinator.events import Instruction, Send
from coremill.coordinator.jobs import Lease, Sequence, Slot, WaitingLine
from coremill.coordinator.lending import Loans
from coremill.coordinator.limits import Limits
from coremill.coordinator.prefix import Match
from coremill.coordinator.tables import Table, Tables

# top_p 0 means the most likely token alone; so does any share this small.
SMALLEST_TOP_P = 1e-9


class Placement:
    """State of the scheduler, and its decisions. counts: moved (leases that went on with another worker), paused,
    dropped_blocks, recomputed_tokens (had been computed and were lost), cached_tokens (of prompts, found)."""

    def __init__(self, limits: Limits, stop_ids: Iterable[int]) -> None:
        self.limits = limits
        self.stop_ids = tuple(stop_ids)
        self.tables = Tables(limits.num_blocks, limits.prefix_cache)
        self.loans = Loans(limits.groups)
        self.slots = [Slot(index) for index in range(limits.num_workers)]
        self.waiting = WaitingLine()
        self.tables.index.is_wanted = self.waiting.has_beginning
        self.suspects = WaitingLine()
        self.parked: dict[int, Sequence] = {}  # by ticket: waiting for what another computes, and in no line
        self.sequences: dict[int, Sequence] = {}  # by ticket, until finished
        self.counts = dict.fromkeys(("moved", "paused", "dropped_blocks", "recomputed_tokens", "cached_tokens"), 0)
        self.paused = False
        self._hungry: dict[int, Lease] = {}  # leases whose tables should grow now
        self._num_growing = 0  # leases whose tables may still grow
        self._num_closing = 0
        self._last_lease = 0
        self._priorities: Counter[int] = Counter()  # of unfinished sequences
        self._unfit: tuple | None = None  # who did not fit, and when
        self._recent: tuple[int, ...] = ()  # prompt of the last fresh sequence that began
        self._out: list[Instruction] = []

    def _decide(self, now: float) -> None:
        if self._hungry:
            self._feed_hungry()
        if self.paused:
            for slot in self.slots:
                self._ask_all_back(slot)
        else:
            if len(self._priorities) > 1:
                self._rest_lower()
            if self.waiting or self.suspects:
                self._fill_workers(now)
            self._balance()
        for slot in self.slots:
            if slot.state == "draining":
                self._drain(slot)
        self._out += self.loans.settle(self.slots, more=not self._num_closing)

    # ---- blocks for those who run ----

    def _blocks_wanted(self, sequence: Sequence) -> int:
        ahead = min(len(sequence.tokens) + self.limits.look_ahead, sequence.max_positions)
        return self.limits.blocks_for(max(ahead, 1))

    def _is_growing(self, sequence: Sequence, table: Table) -> bool:
        """Whether it may want more blocks some day."""
        return len(table.blocks) < self.limits.blocks_for(sequence.max_positions)

    def _feed_hungry(self) -> None:
        """Extend tables that run short, the most entitled first; without blocks make somebody give way."""
        for lease in sorted(self._hungry.values(), key=lambda lease: lease.sequence.rank):
            if lease.closing:  # gave way to one served before it
                continue
            table = lease.table
            missing = self._blocks_wanted(lease.sequence) - len(table.blocks)
            urgent = len(table.blocks) * self.limits.block_tokens - table.computed < self.limits.urgent
            if urgent and missing > self.tables.num_available:
                self._make_room(missing, lease.sequence)
            count = min(missing, self.tables.num_available)
            if count > 0 and not lease.closing:
                taken = self.tables.grow(table, count)
                lease.growing = self._is_growing(lease.sequence, table)
                self._num_growing -= not lease.growing
                self._out.append(Send(lease.worker, Extend(lease.number, tuple(taken))))
            if count >= missing:
                del self._hungry[lease.number]

    def _make_room(self, count: int, wanting: Sequence) -> None:
        """For one that runs: the least entitled give way, itself among them."""
        holders = [seq for seq in self.sequences.values() if seq.table is not None and seq.rank >= wanting.rank]
        self._take_from(holders, count)

    def _take_from(self, holders: list[Sequence], count: int) -> None:
        """Make `count` blocks available, now or soon: who is paused loses blocks, who runs is paused, the least
        entitled first."""
        coming = 0
        holders.sort(key=lambda sequence: sequence.rank)
        while holders and count > self.tables.num_available + coming:
            victim = holders.pop()
            lease = victim.lease
            if lease is None:
                self._drop(victim, count - self.tables.num_available - coming)
                continue
            if not lease.closing and not self._runs_alone(lease):
                victim.num_preempted += 1
                self._pause(lease)
            coming += len(victim.table.blocks)

    def _runs_alone(self, lease: Lease) -> bool:
        return all(other is lease for slot in self.slots for other in slot.leases.values())

    def _pause(self, lease: Lease) -> None:
        self.counts["paused"] += 1
        self._ask_back(lease)

    def _ask_back(self, lease: Lease) -> None:
        """At the worker's next step boundary."""
        lease.closing = True
        self._num_closing += 1
        self._hungry.pop(lease.number, None)
        self._out.append(Send(lease.worker, Release(lease.number)))

    def _drop(self, sequence: Sequence, count: int) -> None:
        """Take the last blocks of a sequence that does not run."""
        before = len(sequence.table.blocks)
        self.tables.shrink(sequence.table, count)
        self.counts["dropped_blocks"] += before - len(sequence.table.blocks)
        if not sequence.table.blocks:
            sequence.table = None

    # ---- the urgent before all others ----

    def _rest_lower(self) -> None:
        """Whoever has less than the highest priority rests: an urgent sequence has the machine for itself."""
        highest = max(self._priorities)
        for lease in self._leases():
            if lease.sequence.request.priority < highest and not lease.closing:
                self._pause(lease)

    def _is_of_lower(self, table: Table, sequence: Sequence) -> bool:
        """Whether the table, which grows and so has a lease, is somebody's who rests while the sequence is there."""
        owner = next((lease.sequence for lease in self._leases() if lease.table is table), None)
        return owner is not None and owner.request.priority < sequence.request.priority

    # ---- work for those who have room ----

    def _fill_workers(self, now: float) -> None:
        share, highest = self._share(), max(self._priorities)
        open_slots = [slot for slot in self.slots if slot.state == "ready" and len(slot.leases) < share]
        loads: dict[int, tuple[int, int, int]] = {}  # of slots, until they change: each is a sum over its sequences
        while open_slots:
            candidates, line = open_slots, self.waiting
            if self.suspects and self.suspects.peek().request.priority == highest:
                innocent = [slot for slot in open_slots if not slot.has_suspect]
                if innocent:
                    candidates, line = innocent, self.suspects
            sequence = line.peek(self._recent if self.tables.index.num_evicted else ())
            if sequence is None or sequence.request.priority < highest:
                return
            match = self._fitting(sequence)
            if match is None:
                return
            line.pop(sequence)
            if match.wait is not None and line is self.waiting:  # suspects wait for nobody
                self._park(sequence, match)
                continue
            slot = min(candidates, key=lambda slot: loads.get(slot.index) or loads.setdefault(slot.index, slot.load))
            self._begin(sequence, slot, match, now)
            del loads[slot.index]
            if len(slot.leases) >= share:
                open_slots.remove(slot)

    def _share(self) -> int:
        """Most sequences per worker. When few are left they are spread, also over workers still starting."""
        total = len(self.suspects) + len(self.waiting) + len(self.parked) + sum(len(slot.leases) for slot in self.slots)
        live = sum(slot.live for slot in self.slots)
        return min(self.limits.max_active, -(-total // max(live, 1)))

    def _fitting(self, sequence: Sequence) -> Match | None:
        """What is known of the sequence, if it can begin now (or wait for more); None when blocks are short.

        It is admitted on its current need, if those who run keep room to grow; more of it the more often it gave way.
        """
        tables, table = self.tables, sequence.table
        wanted = self._blocks_wanted(sequence)
        moves = table is not None and not sequence.num_preempted and len(table.blocks) >= wanted
        if self._hungry and not moves:
            return None
        reserve = 0 if moves else self._num_growing << min(sequence.num_preempted, 4)
        idle = self._nobody_runs()
        now = (sequence.ticket, tables.num_available, reserve, self._num_closing, idle)
        if now == self._unfit:
            return None
        match = tables.match(sequence.tokens, table)
        if match.wait is not None and len(self._priorities) > 1 and self._is_of_lower(match.wait, sequence):
            match.wait = None
        if match.wait is not None and sequence.charged_at is None:
            return match
        if tables.num_needed(match, table, wanted) + reserve > tables.num_available:
            match.count = 0  # the source of a copy is a block more
        needed = tables.num_needed(match, table, wanted) + reserve
        if needed <= tables.num_available or moves:
            return match
        if idle:
            self._take_from_paused(sequence, wanted)
            match = Match(list(sequence.table.nodes) if sequence.table else [])
            if tables.num_needed(match, sequence.table, wanted) <= tables.num_available:
                return match
        elif sequence.request.priority > min(self._priorities):
            lower = [
                other
                for other in self.sequences.values()
                if other.table is not None
                and other.request.priority < sequence.request.priority
                and other.charged_at is None  # suspects are served before all others: they would be back at once
            ]
            self._take_from(lower, needed)
        self._unfit = now
        return None

    def _nobody_runs(self) -> bool:
        return not any(slot.leases for slot in self.slots)

    def _take_from_paused(self, sequence: Sequence, wanted: int) -> None:
        """Blocks of all others, since nobody runs who could give any back."""
        if sequence.table is not None:
            self.tables.cancel_copy(sequence.table)
            wanted -= len(sequence.table.blocks)
        self._take_from([other for other in self.sequences.values() if other.table and other is not sequence], wanted)

    def _park(self, sequence: Sequence, match: Match) -> None:
        sequence.waits_for = match.wait
        self.parked[sequence.ticket] = sequence
        self.tables.wait(match.wait, match.needed, sequence)

    def _unpark(self, woken: Iterable[Sequence]) -> None:
        """Who waited for tokens that are there now, or will not come."""
        for sequence in woken:
            if self.parked.pop(sequence.ticket, None) is not None:
                sequence.waits_for = None
                self._line_of(sequence).push(sequence)

    def _line_of(self, sequence: Sequence) -> WaitingLine:
        return self.waiting if sequence.charged_at is None else self.suspects

    def _begin(self, sequence: Sequence, slot: Slot, match: Match, now: float) -> None:
        self._last_lease += 1
        table = self.tables.open(sequence.tokens, match, self._blocks_wanted(sequence), sequence.table)
        lease = Lease(self._last_lease, slot.index, sequence, table, self._is_growing(sequence, table))
        slot.leases[lease.number] = lease
        self._num_growing += lease.growing
        self._count_begin(sequence, slot, table.computed)
        if sequence.last_worker < 0:
            self._recent = sequence.request.prompt_ids
        sequence.table, sequence.lease, sequence.last_worker = table, lease, slot.index
        sequence.enter("prefill", now)
        request = sequence.request
        begin = Begin(
            lease=lease.number,
            tokens=tuple(sequence.tokens),
            num_prompt=sequence.num_prompt,
            computed=table.computed,
            alone_until=sequence.charged_at,
            blocks=tuple(table.blocks),
            copy=table.copy,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=max(request.top_p, SMALLEST_TOP_P),
            top_k=request.top_k,
            min_p=request.min_p,
            seed=request.seed,
            stop=request.stop,
            stop_ids=self.stop_ids,
        )
        self._out.append(Send(slot.index, begin))

    def _count_begin(self, sequence: Sequence, slot: Slot, computed: int) -> None:
        """cached: what it never had to compute of its prompt; recomputed: what it had once and has no more."""
        num_prompt, had = sequence.num_prompt, sequence.progress
        found = max(0, min(computed, num_prompt) - min(had, num_prompt))
        sequence.cached += found
        self.counts["cached_tokens"] += found
        slot.cached_tokens += found
        slot.prompt_tokens += num_prompt if sequence.last_worker < 0 else 0
        self.counts["recomputed_tokens"] += max(0, had - computed)
        self.counts["moved"] += had > 0 and sequence.last_worker not in (-1, slot.index)
        sequence.progress = max(had, computed)
        if sequence.charged_at is not None:  # what it has found proves nothing
            sequence.charged_at = max(sequence.charged_at, computed)

    # ---- from the busy to the idle ----

    def _balance(self) -> None:
        """Move sequences when a worker holds at least two more than another, and nobody waits who could fill it."""
        if self._num_closing:
            return
        ready = [slot for slot in self.slots if slot.state == "ready"]
        if len(ready) < 2:
            return
        busiest, idlest = max(ready, key=_num_leases), min(ready, key=_num_leases)
        surplus = _num_leases(busiest) - _num_leases(idlest)
        if surplus < 2 or len(self.suspects):
            return
        movable = [lease for lease in busiest.leases.values() if lease.sequence.charged_at is None]
        movable.sort(key=lambda lease: lease.sequence.work_left)
        for lease in movable[-(surplus // 2) :]:
            self._ask_back(lease)

    def _drain(self, slot: Slot) -> None:
        """Nothing new comes to it; what it has goes on elsewhere; then it leaves."""
        self._ask_all_back(slot)
        if slot.up and not slot.leases and not slot.told_to_stop:
            slot.told_to_stop = True
            self._out.append(Send(slot.index, Stop()))

    def _ask_all_back(self, slot: Slot) -> None:
        for lease in list(slot.leases.values()):
            if not lease.closing:
                self._ask_back(lease)

    def _leases(self) -> Iterator[Lease]:
        # Copies: statistics are read from other threads.
        return (lease for slot in self.slots for lease in list(slot.leases.values()))


def _num_leases(slot: Slot) -> int:
    return len(slot.leases)
