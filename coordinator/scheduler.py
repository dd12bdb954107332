"""Which sequence runs where, with which blocks. Events in, instructions out: no socket, clock or process here.

The life of a sequence

    Submitted --> waiting --> leased: prefill --> leased: decode --> finished
                     ^            |    |                |
                     |            '----'-- Released ----|   (blocks were short: the least entitled gives way)
                     '---------------------WorkerDied --'   (its tokens so far are prefilled again elsewhere)

A lease owns its blocks from Begin until the worker has said Finished, Released or Failed, or is dead and reaped.
"""

from __future__ import annotations

from collections.abc import Iterable

from coremill.config.errors import RequestError
from coremill.config.messages import (
    Begin,
    Cancel,
    Extend,
    Failed,
    Ready,
    Release,
    Released,
    Stepped,
    Stop,
)
from coremill.coordinator.blocks import BlockPool
from coremill.coordinator.events import (
    Cancelled,
    Closing,
    Event,
    Finish,
    FromWorker,
    GiveUp,
    Instruction,
    RetireWorker,
    Send,
    StartWorker,
    Submitted,
    WorkerDied,
)
from coremill.coordinator.jobs import Lease, Sequence, Slot, WaitingLine
from coremill.coordinator.limits import Limits, refusal

# Two fruitless deaths in a row and a worker is not started again; the last worker gets a few more chances.
FRUITLESS_DEATHS = 2
FRUITLESS_DEATHS_OF_LAST = 5
# As many deaths at work without a single step of any worker between them: it is not single rows that are wrong.
DEATHS_WITHOUT_STEP = 64
# A row that did this to a worker which ran nothing else is set aside.
DEATHS_ALONE = 2
# top_p 0 means the most likely token alone; so does any share this small.
SMALLEST_TOP_P = 1e-9


class SchedulerError(AssertionError):
    """The books are wrong, or a worker said what it cannot say: a bug, not a condition."""


class Scheduler:
    """See the module. `advance` is the only door; `check` may be called at any time. stop_ids: tokens that end
    generation."""

    def __init__(self, limits: Limits, stop_ids: Iterable[int] = ()) -> None:
        self.limits = limits
        self.stop_ids = tuple(stop_ids)
        self.blocks = BlockPool(limits.num_blocks)
        self.slots = [Slot(index) for index in range(limits.num_workers)]
        self.waiting = WaitingLine()
        self.suspects = WaitingLine()
        self.sequences: dict[int, Sequence] = {}  # by ticket, until finished
        self.closed: tuple[str, str] | None = None  # error code and message of whatever comes now
        self._hungry: dict[int, Lease] = {}  # leases whose tables should grow now
        self._num_growing = 0  # leases whose tables may still grow
        self._last_lease = 0
        self._deaths_without_step = 0
        self._out: list[Instruction] = []

    def start(self) -> list[Instruction]:
        """The first instructions."""
        return [StartWorker(slot.index) for slot in self.slots]

    def advance(self, events: Iterable[Event], now: float) -> list[Instruction]:
        """Take in events that have happened by `now` (seconds, any origin); say what to do."""
        self._out = []
        for event in events:
            match event:
                case FromWorker(worker, message):
                    self._heard(self.slots[worker], message, now)
                case Submitted(ticket, request):
                    self._submitted(ticket, request, now)
                case Cancelled(ticket):
                    self._cancelled(ticket, now)
                case WorkerDied():
                    self._died(event, now)
                case Closing(code, reason):
                    self._finish_all(code, reason, now)
        if self.closed is None:
            self._feed_hungry(now)
            self._fill_workers(now)
        return self._out

    # ---- what has happened ----

    def _submitted(self, ticket: int, request, now: float) -> None:
        sequence = Sequence(ticket, request, list(request.prompt_ids), phase_since=now)
        error = RequestError(*self.closed) if self.closed else refusal(request, self.limits)
        if error is not None:
            self._out.append(Finish(ticket, sequence.result(now, error=error)))
            return
        self.sequences[ticket] = sequence
        self.waiting.push(sequence)

    def _cancelled(self, ticket: int, now: float) -> None:
        sequence = self.sequences.get(ticket)
        if sequence is None:
            return
        if sequence.lease is None:
            self._line_of(sequence).remove(sequence)
        else:
            lease, sequence.lease = sequence.lease, None
            self._hungry.pop(lease.number, None)
            lease.closing = True
            self._out.append(Send(lease.worker, Cancel(lease.number)))
        self._finish(sequence, now, error=RequestError("cancelled", "the request was cancelled"))

    def _heard(self, slot: Slot, message, now: float) -> None:
        match message:
            case Stepped():
                self._stepped(slot, message, now)
            case Ready():
                slot.state = "ready"
            case Released(number, computed):
                lease = self._close_lease(slot, number)
                if lease.sequence.lease is lease:
                    lease.sequence.acknowledge(computed)
                    self._requeue(lease.sequence, now)
            case Failed(number, code, text):
                lease = self._close_lease(slot, number)
                if lease.sequence.lease is lease:
                    self._finish(lease.sequence, now, error=RequestError(code, text))

    def _stepped(self, slot: Slot, message: Stepped, now: float) -> None:
        slot.stepped = True
        slot.fruitless_deaths = self._deaths_without_step = 0
        for number, computed in message.prefilled:
            self._moved_on(self._lease(slot, number), computed)
        for number, token, text in message.tokens:
            lease = self._lease(slot, number)
            sequence = lease.sequence
            if sequence.lease is lease:
                if sequence.phase == "prefill":
                    sequence.enter("decode", now)
                computed = len(sequence.tokens)
                sequence.tokens.append(token)
                sequence.text += text
                self._moved_on(lease, computed)
        for number, reason in message.finished:
            lease = self._close_lease(slot, number)
            if lease.sequence.lease is lease:
                self._finish(lease.sequence, now, finish_reason=reason)

    def _moved_on(self, lease: Lease, computed: int) -> None:
        lease.computed = computed
        lease.sequence.acknowledge(computed)
        if not lease.closing and len(lease.blocks) < self._blocks_wanted(lease.sequence):
            self._hungry[lease.number] = lease

    # ---- deaths ----

    def _died(self, event: WorkerDied, now: float) -> None:
        slot = self.slots[event.worker]
        was_ready, stepped, held = slot.state == "ready", slot.stepped, list(slot.leases)
        charged = self._charge(slot, event, now)
        for number in held:
            lease = self._close_lease(slot, number)
            if lease.sequence.lease is lease:
                self._requeue(lease.sequence, now)
        slot.state, slot.stepped = "starting", False
        at_work = held or not was_ready
        if at_work and not (stepped or charged):
            slot.fruitless_deaths += 1
        self._deaths_without_step += bool(at_work)
        if self.closed is None:
            self._restart_or_not(slot, event, now)

    def _charge(self, slot: Slot, event: WorkerDied, now: float) -> bool:
        """Book a crash on those who may have caused it. False when nobody can have.

        Rows that shared the step are suspects, not culprits: each runs alone until it has moved on.
        """
        if not event.crashed or not slot.leases:
            return False
        alone = slot.leases.get(event.alone)
        if alone is None:
            for lease in slot.leases.values():
                if lease.sequence.lease is lease and lease.sequence.charged_at is None:
                    lease.sequence.charged_at = lease.sequence.progress
            return True
        sequence = alone.sequence
        if sequence.lease is not alone or sequence.charged_at is None:
            return True
        sequence.deaths_alone += 1
        if sequence.deaths_alone >= DEATHS_ALONE:
            text = (
                f"the worker crashed {DEATHS_ALONE} times while it ran this request alone ({event.cause}); "
                "the request has been set aside"
            )
            sequence.lease = None
            self._finish(sequence, now, error=RequestError("worker_crashed", text))
        return True

    def _restart_or_not(self, slot: Slot, event: WorkerDied, now: float) -> None:
        last = sum(other.live for other in self.slots) == 1
        limit = FRUITLESS_DEATHS_OF_LAST if last else FRUITLESS_DEATHS
        hopeless = event.hopeless or slot.fruitless_deaths >= limit
        if self._deaths_without_step >= DEATHS_WITHOUT_STEP or (hopeless and last):
            self._give_up(event.cause, now)
        elif hopeless:
            slot.state = "retired"
            self._out.append(RetireWorker(slot.index, event.cause))
        else:
            self._out.append(StartWorker(slot.index))

    def _give_up(self, cause: str, now: float) -> None:
        reason = f"no worker can go on: {cause}"
        self._finish_all("engine_failed", reason, now)
        self._out.append(GiveUp(reason))

    def _finish_all(self, code: str, reason: str, now: float) -> None:
        if self.closed is not None:
            return
        self.closed = (code, reason)
        for sequence in list(self.sequences.values()):
            if sequence.lease is None:
                self._line_of(sequence).remove(sequence)
            sequence.lease = None
            self._finish(sequence, now, error=RequestError(code, reason))
        self._hungry.clear()
        self._out += [Send(slot.index, Stop()) for slot in self.slots if slot.live]

    # ---- ends and returns ----

    def _finish(self, sequence: Sequence, now: float, finish_reason=None, error: RequestError | None = None) -> None:
        sequence.lease = None
        del self.sequences[sequence.ticket]
        self._out.append(Finish(sequence.ticket, sequence.result(now, finish_reason, error)))

    def _requeue(self, sequence: Sequence, now: float) -> None:
        sequence.lease = None
        sequence.enter("queued", now)
        self._line_of(sequence).push(sequence)

    def _line_of(self, sequence: Sequence) -> WaitingLine:
        return self.waiting if sequence.charged_at is None else self.suspects

    @staticmethod
    def _lease(slot: Slot, number: int | None) -> Lease:
        lease = slot.leases.get(number)
        if lease is None:
            raise SchedulerError(f"worker {slot.index} speaks of lease {number}, which it does not hold")
        return lease

    def _close_lease(self, slot: Slot, number: int | None) -> Lease:
        lease = self._lease(slot, number)
        del slot.leases[number]
        self._hungry.pop(number, None)
        self._num_growing -= self._is_growing(lease)
        self.blocks.give_back(lease.blocks)
        return lease

    # ---- blocks for those who run ----

    def _blocks_wanted(self, sequence: Sequence) -> int:
        ahead = min(len(sequence.tokens) + self.limits.look_ahead, sequence.max_positions)
        return self.limits.blocks_for(max(ahead, 1))

    def _feed_hungry(self, now: float) -> None:
        """Extend tables that run short, the most entitled first; without free blocks make somebody give way."""
        for lease in sorted(self._hungry.values(), key=lambda lease: lease.sequence.rank):
            if lease.closing:  # gave way to one served before it
                continue
            missing = self._blocks_wanted(lease.sequence) - len(lease.blocks)
            count = min(missing, self.blocks.num_free)
            if count > 0:
                taken = self.blocks.take(count)
                lease.blocks += taken
                self._num_growing -= not self._is_growing(lease)
                self._out.append(Send(lease.worker, Extend(lease.number, tuple(taken))))
            if count >= missing:
                del self._hungry[lease.number]
            elif len(lease.blocks) * self.limits.block_tokens - lease.computed < self.limits.urgent:
                self._make_room(missing - count)

    def _make_room(self, needed: int) -> None:
        """Ask the least entitled sequences for their blocks until `needed` are on their way back."""
        leases = [lease for slot in self.slots for lease in slot.leases.values()]
        needed -= sum(len(lease.blocks) for lease in leases if lease.closing)
        running = sorted((lease for lease in leases if not lease.closing), key=lambda lease: lease.sequence.rank)
        while needed > 0 and len(running) > 1:
            victim = running.pop()
            needed -= len(victim.blocks)
            victim.closing = True
            victim.sequence.num_preempted += 1
            self._hungry.pop(victim.number, None)
            self._out.append(Send(victim.worker, Release(victim.number)))

    # ---- work for those who idle ----

    def _fill_workers(self, now: float) -> None:
        if not (self.waiting or self.suspects):
            return
        share = self._share()
        open_slots = [slot for slot in self.slots if slot.state == "ready" and len(slot.leases) < share]
        while open_slots:
            candidates, line = open_slots, self.waiting
            if self.suspects:
                innocent = [slot for slot in open_slots if not slot.has_suspect]
                if innocent:
                    candidates, line = innocent, self.suspects
            sequence = line.peek()
            if sequence is None or not self._fits(sequence):
                return
            line.pop(sequence)
            slot = min(candidates, key=lambda slot: slot.load)
            self._begin(sequence, slot, now)
            if len(slot.leases) >= share:
                open_slots.remove(slot)

    def _share(self) -> int:
        """Most sequences per worker. When few are left they are spread, also over workers still starting."""
        total = len(self.suspects) + len(self.waiting) + sum(len(slot.leases) for slot in self.slots)
        live = sum(slot.live for slot in self.slots)
        return min(self.limits.max_active, -(-total // live))

    def _fits(self, sequence: Sequence) -> bool:
        """Admit on current need, if those who run keep room to grow; more of it the more often it gave way."""
        if self._hungry:
            return False
        reserve = self._num_growing << min(sequence.num_preempted, 4)
        return self._blocks_wanted(sequence) + reserve <= self.blocks.num_free

    def _is_growing(self, lease: Lease) -> bool:
        """Whether it may want more blocks some day."""
        return len(lease.blocks) < self.limits.blocks_for(lease.sequence.max_positions)

    def _begin(self, sequence: Sequence, slot: Slot, now: float) -> None:
        self._last_lease += 1
        lease = Lease(self._last_lease, slot.index, sequence, self.blocks.take(self._blocks_wanted(sequence)))
        slot.leases[lease.number] = lease
        self._num_growing += self._is_growing(lease)
        sequence.lease, sequence.last_worker = lease, slot.index
        sequence.enter("prefill", now)
        request = sequence.request
        begin = Begin(
            lease=lease.number,
            tokens=tuple(sequence.tokens),
            num_prompt=sequence.num_prompt,
            computed=0,
            alone_until=sequence.charged_at,
            blocks=tuple(lease.blocks),
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

    # ---- the books ----

    def check(self) -> None:
        """AssertionError unless every block is free or in one table and every sequence is in one place."""
        leases = [lease for slot in self.slots for lease in slot.leases.values()]
        self.blocks.check(lease.blocks for lease in leases)
        assert self._num_growing == sum(map(self._is_growing, leases)), "growing leases are miscounted"
        running = [lease.sequence.ticket for lease in leases if lease.sequence.lease is lease]
        waiting = [sequence.ticket for line in (self.waiting, self.suspects) for sequence in line]
        assert sorted(running + waiting) == sorted(self.sequences), "a sequence is lost or in two places"
        assert all(slot.state == "ready" for slot in self.slots if slot.leases), "a lease without a ready worker"
