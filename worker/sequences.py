"""The sequences a worker holds, and which of their tokens the next step takes.

    tokens   |........computed........|......pending......|
    blocks   |..............room..............|              pending tokens beyond the room wait for Extend

One pending token is a decode row, more are a prefill chunk; both ride in the same step.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from coremill.config.arena import BLOCK_TOKENS
from coremill.config.messages import Begin
from coremill.worker.batch import SampleSpec
from coremill.worker.stops import StopMatcher


class Sequence:
    """One lease as the worker sees it. A token is chosen whenever nothing is pending any more."""

    __slots__ = (
        "alone_until",
        "blocks",
        "computed",
        "lease",
        "matcher",
        "max_tokens",
        "num_prompt",
        "sample",
        "stop_ids",
        "tokens",
    )

    def __init__(self, begin: Begin, token_bytes) -> None:
        self.lease = begin.lease
        self.tokens = array("i", begin.tokens)  # what C reads, without conversion
        self.num_prompt = begin.num_prompt
        self.computed = begin.computed
        self.blocks = array("i", begin.blocks)
        self.max_tokens = begin.max_tokens
        self.alone_until = begin.alone_until
        self.sample = SampleSpec(begin.temperature, begin.top_p, begin.top_k, begin.min_p, begin.seed)
        self.stop_ids = begin.stop_ids
        self.matcher = StopMatcher(begin.stop)
        for token in self.tokens[self.num_prompt :]:  # what earlier leases generated has been shown already
            self.matcher.feed(token_bytes[token])

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def suspect(self) -> bool:
        """It must have its steps for itself."""
        return self.alone_until is not None and self.computed <= self.alone_until

    @property
    def num_ready(self) -> int:
        """Pending tokens that have room in blocks."""
        return min(self.num_pending, len(self.blocks) * BLOCK_TOKENS - self.computed)

    def choose(self, token: int, piece: bytes) -> tuple[bytes, str | None]:
        """Append a generated token; the bytes it lets us show, and "stop" or "length" when it is the last."""
        self.tokens.append(token)
        shown, stopped = self.matcher.feed(piece)
        if stopped:
            return shown, "stop"
        if token in self.stop_ids:
            return shown + self.matcher.flush(), "stop"
        if len(self.tokens) - self.num_prompt >= self.max_tokens:
            return shown + self.matcher.flush(), "length"
        return shown, None


def prefill_floor(step_tokens: int) -> int:
    """Rows of a step that prefill may take even when decode rows fill it: new sequences always move."""
    return max(1, step_tokens // 4)


def max_step_rows(step_tokens: int, max_active: int) -> int:
    """Most rows that plan_step ever puts into one step."""
    return max(step_tokens, max_active + prefill_floor(step_tokens))


def plan_step(sequences: Iterable[Sequence], step_tokens: int) -> list[tuple[Sequence, int]]:
    """(sequence, number of its pending tokens) for the next step: all decode rows, then chunks, oldest first."""
    ready = [(sequence, sequence.num_ready) for sequence in sequences]
    for sequence, count in ready:
        if sequence.suspect:
            return [(sequence, min(count, step_tokens))] if count else []
    plan = [(sequence, 1) for sequence, count in ready if count and sequence.num_pending == 1]
    budget = max(step_tokens - len(plan), prefill_floor(step_tokens))
    for sequence, count in ready:
        if count and sequence.num_pending > 1 and budget:
            count = min(count, budget)
            plan.append((sequence, count))
            budget -= count
    return plan
