"""The worker's loop: hear what is new, build a step, compute it, tell what came out.

As long as something can run, only messages that are there already are heard between two steps; otherwise the
worker sleeps until one comes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import astuple
from typing import Protocol

from coremill.config.counters import CounterPage
from coremill.config.errors import EngineError
from coremill.config.messages import (
    Begin,
    Borrow,
    Cancel,
    Extend,
    Failed,
    Measured,
    Message,
    ProtocolError,
    Release,
    Released,
    Stats,
    Stepped,
    Stop,
)
from coremill.config.smaps import Memory
from coremill.worker.batch import StepBatch, StepOutput
from coremill.worker.borrowing import Borrowing
from coremill.worker.sequences import Sequence, plan_step


class Channel(Protocol):
    """The worker's end of the socket."""

    def send(self, message: Message) -> None: ...
    def receive(self, wait: bool) -> Message | None:
        """The next message; without `wait`, None when there is none yet."""


class Model(Protocol):
    def new_batch(self) -> StepBatch: ...
    def step(self, batch: StepBatch) -> list[StepOutput]: ...
    def copy_block(self, source: int, target: int, num_tokens: int) -> None: ...
    def borrow(self, cores: SequenceOf[int]) -> None: ...
    def profile(self) -> SequenceOf[tuple[str, str, int, float]]: ...


class WorkerLoop:
    """Holds the sequences of one worker.

    Args:
        token_bytes: bytes of each token id, b"" for those that are not shown.
        step_tokens: rows of a step and longest prefill chunk.
        num_threads: of a step, without borrowed cores.
        counters: this worker's page.
        measure: this process' memory.
    """

    def __init__(
        self,
        channel: Channel,
        model: Model,
        token_bytes: SequenceOf[bytes],
        *,
        step_tokens: int,
        num_threads: int = 1,
        counters: CounterPage,
        measure,
    ) -> None:
        self.channel = channel
        self.model = model
        self.batch = model.new_batch()
        self.token_bytes = token_bytes
        self.step_tokens = step_tokens
        self.counters = counters
        self.measure = measure
        self.sequences: dict[int, Sequence] = {}  # by lease, oldest first
        self.borrowing = Borrowing(num_threads)
        self._borrowed: tuple[int, ...] = ()  # the cores that the model uses beside its own
        self._newest = 0

    def run(self) -> None:
        """Until Stop."""
        plan = self.plan()
        while True:
            message = self.channel.receive(wait=not plan)
            if message is not None:
                while message is not None:
                    if isinstance(message, Stop):
                        return
                    self.hear(message)
                    message = self.channel.receive(wait=False)
                plan = self.plan()
            if plan:
                self.step(plan)
                plan = self.plan()

    def plan(self) -> list[tuple[Sequence, int]]:
        """What the next step would do; empty when nothing can run."""
        return plan_step(self.sequences.values(), self.step_tokens)

    def hear(self, message: Message) -> None:
        """Act on a message other than Stop."""
        match message:
            case Begin():
                if message.copy is not None:
                    self.model.copy_block(*message.copy)
                self.sequences[message.lease] = Sequence(message, self.token_bytes)
                self._newest = message.lease
            case Extend():
                sequence = self._find(message.lease)
                if sequence is not None:
                    sequence.blocks.extend(message.blocks)
            case Cancel() | Release():
                sequence = self._find(message.lease)
                if sequence is not None:
                    del self.sequences[message.lease]
                    self.channel.send(Released(message.lease, sequence.computed))
            case Borrow():
                self.borrowing.offer(message.cores)
            case Stats():
                memory: Memory = self.measure()
                profile = tuple(map(tuple, self.model.profile()))
                self.channel.send(Measured(message.request, *astuple(memory), profile))
            case _:
                raise ProtocolError(f"a worker cannot be sent {type(message).__name__}")
        self.counters["active"] = len(self.sequences)

    def _find(self, lease: int) -> Sequence | None:
        """None when it has ended here, which the coordinator did not know when it wrote."""
        sequence = self.sequences.get(lease)
        if sequence is None and lease > self._newest:
            raise ProtocolError(f"lease {lease} has never begun here")
        return sequence

    def step(self, plan: list[tuple[Sequence, int]]) -> None:
        """Compute `plan` and report."""
        counters, batch = self.counters, self.batch
        counters["alone_lease"] = plan[0][0].lease if plan[0][0].suspect else 0
        batch.clear()
        for sequence, count in plan:
            end = sequence.computed + count
            sample = sequence.sample if end == len(sequence.tokens) else None
            batch.add(sequence.tokens[sequence.computed : end], sequence.computed, sequence.blocks, sample)
        num_rows = sum(count for _, count in plan)
        self._borrow(self.borrowing.choose(num_rows))
        begun = time.monotonic_ns()
        outputs = self.model.step(batch)
        spent = time.monotonic_ns() - begun
        self.borrowing.observe(num_rows, len(self._borrowed), spent * 1e-9)
        self._report(plan, outputs, spent)
        counters["alone_lease"] = 0

    def _borrow(self, cores: tuple[int, ...]) -> None:
        if cores != self._borrowed:
            try:
                self.model.borrow(cores)
                self._borrowed = cores
            except EngineError:  # refused by the kernel: it goes without until others are lent
                self._borrowed = ()
                self.borrowing.offer(())

    def _report(self, plan: list[tuple[Sequence, int]], outputs: list[StepOutput], spent_ns: int) -> None:
        prefilled, tokens, finished, failed = [], [], [], []
        chosen = iter(outputs)
        rows = prefill_rows = positions = 0
        for sequence, count in plan:
            rows += count
            if count > 1 or sequence.computed < sequence.num_prompt:
                prefill_rows += count
            sequence.computed += count
            positions += sequence.computed
            if sequence.num_pending:
                prefilled.append((sequence.lease, sequence.computed))
                continue
            output = next(chosen)
            if output.status != "ok":
                failed.append(sequence.lease)
                continue
            shown, reason = sequence.choose(output.token, self.token_bytes[output.token])
            tokens.append((sequence.lease, output.token, shown))
            if reason is not None:
                finished.append((sequence.lease, reason))
        self._count(rows, len(plan), prefill_rows, len(tokens), positions, spent_ns)
        for lease in [*failed, *(lease for lease, _ in finished)]:
            del self.sequences[lease]
        self.counters["active"] = len(self.sequences)
        self.channel.send(Stepped(tuple(prefilled), tuple(tokens), tuple(finished), rows, len(plan), spent_ns * 1e-9))
        for lease in failed:
            text = "the model's logits for the next token are not finite numbers"
            self.channel.send(Failed(lease, "nonfinite_logits", text, ""))

    def _count(self, rows: int, sequences: int, prefill_rows: int, chosen: int, positions: int, spent_ns: int) -> None:
        counters = self.counters
        counters["steps"] += 1
        counters["borrowed_steps"] += bool(self._borrowed)
        counters["step_rows"] += rows
        counters["step_sequences"] += sequences
        counters["prefill_tokens"] += prefill_rows
        counters["decode_tokens"] += chosen
        counters["kv_positions"] += positions
        counters["busy_ns"] += spent_ns
