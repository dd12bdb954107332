"""Throughput of the whole engine: real worker processes behind a coordinator.

A decode case submits its prompts, waits until all are computed, then counts tokens over a window in which nothing
but decoding happens; what is still running is cancelled. Prompts are one block shorter than the case's context, so
that contexts in the window lie around it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from coremill.config.arena import BLOCK_TOKENS, ArenaGeometry, blocks_for
from coremill.config.cputimes import cpu_seconds
from coremill.config.engine import EngineConfig
from coremill.config.request import SequenceRequest
from coremill.config.topology import CoreGroup
from coremill.tools.bench.running import TIMEOUT, Running, Started
from coremill.tools.bench.steps import Case

# Tokens of each sequence in the window, and the shortest window in seconds.
_WINDOW_TOKENS, _WINDOW_SECONDS = 64, 0.3
# Prompts each worker computes in a prefill case.
_PREFILL_PROMPTS = 4
_POLL = 0.02


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second over a window of so many seconds, and the CPU seconds spent in it."""

    tokens_per_s: float
    seconds: float
    coordinator_cpu: float
    workers_cpu: float


class EngineBench(Started):
    """A running engine with room for the largest case, `groups` its workers."""

    def __init__(
        self, pack_path: Path, spec: Any, groups: Sequence[CoreGroup], cases: Sequence[Case], step_tokens: int, kv: str
    ):
        from coremill.coordinator.engine import Engine

        max_active = max(_PREFILL_PROMPTS, *(case.num_sequences for case in cases))
        ctx = max(case.context for case in cases) + _room(cases)
        arena = arena_blocks(cases, len(groups)) * ArenaGeometry.for_model(spec, 1, kv).block_bytes
        config = EngineConfig(
            max_active=max_active, ctx=ctx, arena=arena, kv=kv, step_tokens=step_tokens, prefix_cache=False
        )
        self.num_workers = len(groups)
        self._room = _room(cases)
        # Without stop ids every sequence runs until it is cancelled.
        super().__init__(Engine(pack_path, config, groups, stop_ids=()))
        self._num_runs = 0

    def run(self, case: Case) -> Rate:
        """All workers together, over the case's window."""
        return self._prefill(case) if case.what == "prefill" else self._decode(case)

    def _prefill(self, case: Case) -> Rate:
        count = self.num_workers * _PREFILL_PROMPTS
        begin, spent = time.perf_counter(), self._cpu()
        running = Running(self.engine, self._requests(count, case.context, 1))
        running.wait()
        return self._rate(count * case.context, begin, spent)

    def _decode(self, case: Case) -> Rate:
        count = self.num_workers * case.num_sequences
        before = self._tokens("prefill_tokens")
        prompt = case.context - BLOCK_TOKENS
        running = Running(self.engine, self._requests(count, prompt, self._room))
        deadline = time.monotonic() + TIMEOUT
        while self._tokens("prefill_tokens") - before < count * prompt:
            running.check(deadline)
            time.sleep(_POLL)
        start, spent, first = time.perf_counter(), self._cpu(), self._tokens("decode_tokens")
        while True:
            time.sleep(_POLL)
            decoded, now = self._tokens("decode_tokens") - first, time.perf_counter()
            if decoded >= count * _WINDOW_TOKENS and now - start >= _WINDOW_SECONDS:
                break
            # Soon, or all at once on a machine that let nobody look, there is nothing left to decode.
            if decoded >= count * (self._room - 2 * BLOCK_TOKENS) or (decoded and running.done):
                break
            running.check(deadline)
        rate = self._rate(decoded, start, spent)
        running.cancel()
        running.wait()
        return rate

    def _rate(self, tokens: int, start: float, spent: tuple[float, float]) -> Rate:
        seconds, now = time.perf_counter() - start, self._cpu()
        return Rate(tokens / seconds, seconds, now[0] - spent[0], now[1] - spent[1])

    def _cpu(self) -> tuple[float, float]:
        """CPU seconds of the coordinator (all of this process but the calling thread, which only watches) and of all
        workers, since they began."""
        pids = [worker["pid"] for worker in self.engine.glance()["workers"]]
        return time.process_time() - time.thread_time(), sum(cpu_seconds(pid) for pid in pids)

    def _tokens(self, counter: str) -> int:
        """Of all workers; none is asked, which would cost it time of the window."""
        return sum(worker[counter] for worker in self.engine.glance()["workers"])

    def _requests(self, count: int, prompt_tokens: int, max_tokens: int) -> list[SequenceRequest]:
        """Prompts that differ from the first token on, in every run anew."""
        self._num_runs += 1
        prompts = []
        for index in range(count):
            start = 100 + 997 * (self._num_runs * count + index)
            ids = tuple(100 + (start + 31 * position) % 1000 for position in range(prompt_tokens))
            prompts.append(SequenceRequest(f"bench-{index}", ids, max_tokens, temperature=0.0))
        return prompts


def arena_blocks(cases: Sequence[Case], num_workers: int) -> int:
    """Blocks that the largest case needs while all workers run it."""
    room = _room(cases)
    return num_workers * max(
        max(case.num_sequences, _PREFILL_PROMPTS) * blocks_for(case.context + room) for case in cases
    )


def _room(cases: Sequence[Case]) -> int:
    """Tokens a sequence may generate: a fast case needs more for the shortest window than _WINDOW_TOKENS."""
    return 8 * _WINDOW_TOKENS if any(case.what == "decode" for case in cases) else BLOCK_TOKENS


def engine_report(case: Case, rates: Sequence[float], num_workers: int, limit_seconds: float) -> dict[str, Any]:
    """Rates and shares of a case; limit_seconds: least time of the case's steps on one of the cores, all busy."""
    rate = median(rates)
    limit = num_workers * case.num_tokens / limit_seconds
    return {
        "what": case.what,
        "sequences": case.num_sequences,
        "context": case.context,
        "workers": num_workers,
        "tokens_per_s": round(rate, 1),
        "limit_tokens_per_s": round(limit, 1),
        "share": round(rate / limit, 3),
        "noise": round((max(rates) - min(rates)) / rate, 3),
    }
