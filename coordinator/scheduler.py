"""Which sequence runs where, with which blocks. Events in, instructions out: no socket, clock or process here.

The life of a sequence

    Submitted --> waiting --> leased: prefill --> leased: decode --> finished
                     ^            |    |                |
                     |            '----'-- Released ----|   (paused, or on its way to another worker)
                     '---------------------WorkerDied --'   (either way it keeps its table and goes on from there)

A worker may write to a lease's blocks from Begin until it has said Finished, Released or Failed, or is dead and reaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from coremill.config.errors import RequestError
from coremill.config.messages import Cancel, Failed, Ready, Released, Stepped, Stop
from coremill.coordinator.events import (
    Cancelled,
    Closing,
    Event,
    Finish,
    FromWorker,
    GiveUp,
    Instruction,
    Paused,
    RetireWorker,
    Send,
    Show,
    StartWorker,
    Submitted,
    Watched,
    WorkerDied,
    Workers,
    WorkerStopped,
)
from coremill.coordinator.jobs import Lease, Sequence, Slot
from coremill.coordinator.limits import Limits, refusal
from coremill.coordinator.placement import Placement
from coremill.coordinator.tables import Table

# Two fruitless deaths in a row and a worker is not started again; the last worker gets a few more chances.
FRUITLESS_DEATHS = 2
FRUITLESS_DEATHS_OF_LAST = 5
# As many deaths at work without a single step of any worker between them: it is not single rows that are wrong.
DEATHS_WITHOUT_STEP = 64
# A row that did this to a worker which ran nothing else is set aside.
DEATHS_ALONE = 2


class SchedulerError(AssertionError):
    """The books are wrong, or a worker said what it cannot say: a bug, not a condition."""


class Scheduler(Placement):
    """See the module. `advance` is the only door; `check` may be called at any time. stop_ids: tokens that end
    generation."""

    def __init__(self, limits: Limits, stop_ids: Iterable[int] = ()) -> None:
        super().__init__(limits, stop_ids)
        self.closed: tuple[str, str] | None = None  # error code and message of whatever comes now
        self._deaths_without_step = 0

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
                case Watched(ticket):
                    self._watch(ticket)
                case WorkerDied():
                    self._died(event, now)
                case Workers(count):
                    self._change_workers(count)
                case Paused(paused):
                    self.paused = paused
                case Closing(code, reason):
                    self._finish_all(code, reason, now)
        if self.closed is None:
            self._decide(now)
        return self._out

    # ---- what has happened ----

    def _submitted(self, ticket: int, request, now: float) -> None:
        sequence = Sequence(ticket, request, list(request.prompt_ids), phase_since=now)
        error = RequestError(*self.closed) if self.closed else refusal(request, self.limits)
        if error is not None:
            self._out.append(Finish(ticket, sequence.result(now, error=error)))
            return
        self.sequences[ticket] = sequence
        self._priorities[request.priority] += 1
        self.waiting.push(sequence)

    def _cancelled(self, ticket: int, now: float) -> None:
        sequence = self.sequences.get(ticket)
        if sequence is None:
            return
        if sequence.lease is None:
            self._leave_line(sequence)
        else:
            lease = sequence.lease
            self._hungry.pop(lease.number, None)
            self._num_closing += not lease.closing
            lease.closing = True
            self._out.append(Send(lease.worker, Cancel(lease.number)))
            self._detach(sequence)
        self._finish(sequence, now, error=RequestError("cancelled", "the request was cancelled"))

    def _watch(self, ticket: int) -> None:
        sequence = self.sequences.get(ticket)
        if sequence is not None and not sequence.watched:
            sequence.watched = True
            if sequence.text:
                self._out.append(Show(ticket, bytes(sequence.text)))

    def _heard(self, slot: Slot, message, now: float) -> None:
        match message:
            case Stepped():
                self._stepped(slot, message, now)
            case Ready():
                slot.up = True
                if slot.state == "starting":
                    slot.state = "ready"
            case Released(number, computed):
                lease = self._close_lease(slot, number)
                if lease.sequence.lease is lease:
                    lease.sequence.acknowledge(computed)
                    self._unpark(self.tables.acknowledge(lease.table, lease.sequence.tokens, computed))
                    self._requeue(lease.sequence, now)
            case Failed(number, code, text):
                lease = self._close_lease(slot, number)
                if lease.sequence.lease is lease:
                    self._finish(lease.sequence, now, error=RequestError(code, text))

    def _stepped(self, slot: Slot, message: Stepped, now: float) -> None:
        slot.stepped = True
        slot.fruitless_deaths = self._deaths_without_step = 0
        leases = slot.leases
        for number, computed in message.prefilled:
            lease = leases.get(number) or self._lease(slot, number)
            if lease.sequence.lease is lease:
                self._moved_on(lease, computed)
        for number, token, text in message.tokens:
            lease = leases.get(number) or self._lease(slot, number)
            sequence = lease.sequence
            if sequence.lease is lease:
                if sequence.phase == "prefill":
                    sequence.enter("decode", now)
                computed = len(sequence.tokens)
                sequence.tokens.append(token)
                sequence.text += text
                if sequence.watched and text:
                    self._out.append(Show(sequence.ticket, text))
                self._moved_on(lease, computed)
        for number, reason in message.finished:
            lease = self._close_lease(slot, number)
            if lease.sequence.lease is lease:
                self._finish(lease.sequence, now, finish_reason=reason)

    def _moved_on(self, lease: Lease, computed: int) -> None:
        """Once for every token of a run: nothing here may cost more than a few lookups."""
        sequence, table = lease.sequence, lease.table
        sequence.acknowledge(computed)
        if computed >= table.notable:
            self._unpark(self.tables.acknowledge(table, sequence.tokens, computed))
        else:
            table.done = computed
        if lease.growing and not lease.closing and len(table.blocks) < self._blocks_wanted(sequence):
            self._hungry[lease.number] = lease

    # ---- deaths ----

    def _died(self, event: WorkerDied, now: float) -> None:
        slot = self.slots[event.worker]
        was_ready, stepped, held = slot.up, slot.stepped, list(slot.leases)
        charged = self._charge(slot, event, now)
        for number in held:
            lease = self._close_lease(slot, number)
            if lease.sequence.lease is lease:
                self._requeue(lease.sequence, now)
        slot.up = slot.stepped = slot.told_to_stop = False
        if slot.state == "draining":  # as it was told, or on the way there
            slot.state = "stopped"
            self._out.append(WorkerStopped(slot.index))
            return
        slot.state = "starting"
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
            self._detach(sequence)
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
                self._leave_line(sequence)
            else:
                self._detach(sequence)
            self._finish(sequence, now, error=RequestError(code, reason))
        self._hungry.clear()
        self._out += [Send(slot.index, Stop()) for slot in self.slots if slot.live]

    # ---- ends and returns ----

    def _finish(self, sequence: Sequence, now: float, finish_reason=None, error: RequestError | None = None) -> None:
        """No worker holds it any more, or it has been detached."""
        sequence.lease = None
        if sequence.table is not None:
            self._unpark(self.tables.close(sequence.table, sequence.tokens))
            sequence.table = None
        del self.sequences[sequence.ticket]
        priority = sequence.request.priority
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]
        self._out.append(Finish(sequence.ticket, sequence.result(now, finish_reason, error)))

    def _detach(self, sequence: Sequence) -> None:
        """Leave its table to its lease, since the worker may still write to it."""
        self._unpark(self.tables.pause(sequence.table))
        sequence.table = sequence.lease = None

    def _requeue(self, sequence: Sequence, now: float) -> None:
        sequence.lease = None
        sequence.enter("queued", now)
        self._unpark(self.tables.pause(sequence.table))
        self._line_of(sequence).push(sequence)

    def _leave_line(self, sequence: Sequence) -> None:
        if self.parked.pop(sequence.ticket, None) is None:
            self._line_of(sequence).remove(sequence)

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
        self._num_growing -= lease.growing
        self._num_closing -= lease.closing
        if lease.sequence.lease is not lease:
            self.tables.close(lease.table, lease.sequence.tokens)
        return lease

    # ---- more and fewer workers ----

    def _change_workers(self, count: int) -> None:
        """Keep the first `count` places that are not given up."""
        usable = [slot for slot in self.slots if slot.state != "retired"]
        for slot in usable[:count]:
            if slot.state == "stopped":
                slot.state = "starting"
                self._out.append(StartWorker(slot.index))
            elif slot.state == "draining":  # one that was told to stop is started again when it has
                slot.state = "ready" if slot.up and not slot.told_to_stop else "starting"
        for slot in usable[count:]:
            if slot.live:
                slot.state = "draining"

    # ---- the books ----

    def count_blocks(self) -> dict[str, int]:
        """Blocks that are free, cached, shared and private."""
        return self.tables.counts(self._all_tables())

    def _all_tables(self) -> list[Table]:
        tables = [lease.table for lease in self._leases()]
        return tables + [s.table for s in list(self.sequences.values()) if s.lease is None and s.table is not None]

    def check(self) -> None:
        """AssertionError unless every block is in one place and every sequence is in one place."""
        leases = list(self._leases())
        self.tables.check(self._all_tables())
        assert self._num_growing == sum(lease.growing for lease in leases), "growing leases are miscounted"
        assert self._num_closing == sum(lease.closing for lease in leases), "closing leases are miscounted"
        for lease in leases:
            assert lease.sequence.lease is not lease or lease.sequence.table is lease.table, "two tables"
        running = [lease.sequence.ticket for lease in leases if lease.sequence.lease is lease]
        waiting = [sequence.ticket for line in (self.waiting, self.suspects) for sequence in line]
        places = sorted(running + waiting + list(self.parked))
        assert places == sorted(self.sequences), "a sequence is lost or in two places"
        alive = ("ready", "draining")
        assert all(slot.state in alive for slot in self.slots if slot.leases), "a lease without a ready worker"
        if self.closed is None:
            self.loans.check(self.slots)
        assert self._priorities == Counter(s.request.priority for s in self.sequences.values()), "miscounted"
        for sequence in self.parked.values():
            assert any(who is sequence for _, _, who in sequence.waits_for.waiters), "nobody wakes it"
