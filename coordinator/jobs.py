"""What the coordinator knows of sequences, of their stays with workers, and the order in which they are served."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from coremill.config.errors import RequestError
from coremill.config.request import SequenceRequest, SequenceResult
from coremill.coordinator.tables import Table

# A waiting sequence is overtaken by longer ones at most this often.
PATIENCE = 256
# Prompts that have less in common, in tokens or in half of their length, are not served together for its sake.
MIN_SHARED = 64
# Waiting sequences looked at on either side, in the order of their prompts.
LOOK_AROUND = 16
# Behind every ticket.
_AFTER_ALL = 1 << 62


@dataclass(eq=False, slots=True)
class Sequence:
    """One request from submission to result. It survives leases, workers and preemptions.

    tokens: prompt and everything generated so far; text: what has been shown of it, as bytes; watched: somebody reads
    that as it comes.
    table: its blocks, once it has some. waits_for: another's table, which is getting tokens that this one begins with.
    cached: prompt tokens that it did not have to compute.
    progress: the largest number of tokens it ever had, computed for it or found.
    charged_at: its progress when a crash was last charged to it, or None when it has moved on since.
    deaths_alone: crashes since then with nothing else in the step.
    """

    ticket: int
    request: SequenceRequest
    tokens: list[int]
    text: bytearray = field(default_factory=bytearray)
    watched: bool = False
    lease: Lease | None = None
    table: Table | None = None
    waits_for: Table | None = None
    cached: int = 0
    progress: int = 0
    charged_at: int | None = None
    deaths_alone: int = 0
    num_preempted: int = 0
    last_worker: int = -1
    phase: str = "queued"
    phase_since: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: {"queued": 0.0, "prefill": 0.0, "decode": 0.0})

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def max_positions(self) -> int:
        """Positions it can ever need in the arena: the last token it chooses is never read."""
        return self.num_prompt + self.request.max_tokens - 1

    @property
    def work_left(self) -> int:
        """Tokens still to compute, at most."""
        return self.max_positions - (self.table.done if self.table else 0)

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is more entitled to blocks: higher priority first, then older."""
        return (-self.request.priority, self.ticket)

    def enter(self, phase: str, now: float) -> None:
        """Book the time since the last change of phase ("queued", "prefill", "decode", "done")."""
        if self.phase != "done":
            self.seconds[self.phase] += now - self.phase_since
        self.phase, self.phase_since = phase, now

    def acknowledge(self, computed: int) -> None:
        """The first `computed` tokens are in the arena. Moving on clears it of earlier crashes."""
        if computed > self.progress:
            self.progress = computed
            if self.charged_at is not None and computed > self.charged_at:
                self.charged_at, self.deaths_alone = None, 0

    def result(self, now: float, finish_reason: str | None = None, error: RequestError | None = None) -> SequenceResult:
        """The outcome, which ends its life."""
        self.enter("done", now)
        return SequenceResult(
            key=self.request.key,
            token_ids=self.tokens[self.num_prompt :],
            text=self.text.decode("utf-8", "replace"),
            finish_reason=finish_reason,
            error=error,
            queued_s=self.seconds["queued"],
            prefill_s=self.seconds["prefill"],
            decode_s=self.seconds["decode"],
            worker=self.last_worker,
            cached_tokens=self.cached,
        )


@dataclass(eq=False, slots=True)
class Lease:
    """One stay of a sequence with one worker. growing: its table may need more blocks some day.

    closing: asked back, but the worker may still write to its table; when its sequence has another lease or none by
    then, it was cancelled, and the table is nobody else's."""

    number: int
    worker: int
    sequence: Sequence
    table: Table
    growing: bool
    closing: bool = False


@dataclass(slots=True)
class Slot:
    """One worker as the scheduler sees it. up, stepped: its present process is ready, has done a step;
    fruitless_deaths: processes in a row that died without. prompt_tokens: of the sequences that began here;
    cached_tokens: of prompts, found here.

        starting --> ready --> draining --> stopped          (nobody needs it: set_workers)
           ^----------'---------------> retired              (it dies again and again)
    """

    index: int
    state: str = "starting"
    up: bool = False
    leases: dict[int, Lease] = field(default_factory=dict)
    stepped: bool = False
    fruitless_deaths: int = 0
    told_to_stop: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def live(self) -> bool:
        """It runs sequences, or is about to."""
        return self.state in ("starting", "ready")

    @property
    def load(self) -> tuple[int, int, int]:
        """Order in which workers get work: fewest sequences, then least work left."""
        return (len(self.leases), self.work_left, self.index)

    @property
    def work_left(self) -> int:
        """Tokens still to compute, at most."""
        return sum(lease.sequence.work_left for lease in self.leases.values())

    @property
    def has_suspect(self) -> bool:
        return any(lease.sequence.charged_at is not None for lease in self.leases.values())


class _Level:
    """Waiting sequences of equal standing: longest work first, but nobody is overtaken forever."""

    def __init__(self) -> None:
        self._by_age: dict[int, tuple[Sequence, int]] = {}  # ticket -> (sequence, pops when it came)
        self._by_work: list[tuple[int, int]] = []  # heap of (-work, ticket); may hold tickets that have left
        self._by_prompt: list[tuple[tuple[int, ...], int]] = []  # sorted (prompt, ticket) of fresh ones
        self._num_pops = 0

    def __len__(self) -> int:
        return len(self._by_age)

    def push(self, sequence: Sequence, fresh: bool) -> None:
        self._by_age[sequence.ticket] = (sequence, self._num_pops)
        work = sequence.work_left if fresh else 0
        heapq.heappush(self._by_work, (-work, sequence.ticket))
        if fresh:
            insort(self._by_prompt, (sequence.request.prompt_ids, sequence.ticket))

    def peek(self, near: tuple[int, ...]) -> Sequence:
        oldest, came = next(iter(self._by_age.values()))
        if self._num_pops - came >= PATIENCE:
            return oldest
        relative = self._relative(near)
        if relative is not None:
            return relative
        while self._by_work[0][1] not in self._by_age:
            heapq.heappop(self._by_work)
        return self._by_age[self._by_work[0][1]][0]

    def _relative(self, prompt: tuple[int, ...]) -> Sequence | None:
        """Of those that share most of this prompt the one with most work, as far as one look around tells."""
        shared = max(MIN_SHARED, len(prompt) // 2)
        if len(prompt) < shared or not self._by_prompt:
            return None
        beginning = prompt[:shared]
        at = bisect_left(self._by_prompt, (prompt,))
        around = self._by_prompt[max(at - LOOK_AROUND, 0) : at + LOOK_AROUND]
        relatives = [self._by_age[ticket][0] for other, ticket in around if other[:shared] == beginning]
        return max(relatives, key=lambda sequence: sequence.work_left, default=None)

    def has_beginning(self, tokens: tuple[int, ...]) -> bool:
        """Whether the prompt of a fresh one begins with these tokens and goes on."""
        at = bisect_left(self._by_prompt, (tokens, _AFTER_ALL))
        return at < len(self._by_prompt) and self._by_prompt[at][0][: len(tokens)] == tokens

    def pop(self, sequence: Sequence) -> None:
        self.remove(sequence)
        self._num_pops += 1

    def remove(self, sequence: Sequence) -> None:
        del self._by_age[sequence.ticket]
        entry = (sequence.request.prompt_ids, sequence.ticket)
        at = bisect_left(self._by_prompt, entry)
        if at < len(self._by_prompt) and self._by_prompt[at][1] == sequence.ticket:
            del self._by_prompt[at]
        # Short rows that left out of turn would otherwise stay at the bottom for as long as longer ones come.
        if len(self._by_work) > 2 * len(self._by_age) + 64:
            self._by_work = [entry for entry in self._by_work if entry[1] in self._by_age]
            heapq.heapify(self._by_work)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for sequence, _ in self._by_age.values())


class WaitingLine:
    """Everything that waits. Higher priority first; at equal priority what has run before, oldest first,
    then fresh sequences, longest first (the file then ends with short rows, which balance well), or those that begin
    as the last one did (blocks they share are used while they are there)."""

    def __init__(self) -> None:
        self._levels: dict[tuple[int, bool], _Level] = {}
        self._order: list[tuple[int, bool]] = []
        self._where: dict[int, tuple[int, bool]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for key in self._order for sequence in self._levels[key])

    def push(self, sequence: Sequence) -> None:
        fresh = sequence.last_worker < 0
        key = (-sequence.request.priority, fresh)
        if key not in self._levels:
            self._levels[key] = _Level()
            self._order = sorted(self._levels)
        self._levels[key].push(sequence, fresh)
        self._where[sequence.ticket] = key

    def peek(self, near: tuple[int, ...] = ()) -> Sequence | None:
        """The one to serve next. near: prefer fresh ones with a prompt like this."""
        return next((self._levels[key].peek(near) for key in self._order if self._levels[key]), None)

    def has_beginning(self, tokens: tuple[int, ...]) -> bool:
        """Whether one that has never run begins with these tokens and goes on."""
        return any(level.has_beginning(tokens) for level in self._levels.values())

    def pop(self, sequence: Sequence) -> None:
        """Take out the sequence that peek() showed."""
        self._leave(sequence).pop(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that does not want to wait any longer."""
        self._leave(sequence).remove(sequence)

    def _leave(self, sequence: Sequence) -> _Level:
        return self._levels[self._where.pop(sequence.ticket)]
