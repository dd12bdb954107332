"""One sequence alone on a machine for several workers: what it gains from the cores of those that have nothing to run
(coordinator/lending.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from coremill.config.arena import ArenaGeometry, blocks_for
from coremill.config.engine import EngineConfig
from coremill.config.request import SequenceRequest
from coremill.config.topology import CoreGroup
from coremill.tools.bench.running import Running, Started

# Of the request, at most: prompt and generated tokens. As many generated once before, as each worker first tries out.
_PROMPT, _COMPLETION = 512, 128


def lone_report(
    pack_path: Path, spec: Any, groups: Sequence[CoreGroup], rounds: int, step_tokens: int, kv: str
) -> list[dict[str, Any]]:
    """Prefill and decode of one request, with cores lent and without, in turns: rates in tokens per second, `gain`
    their quotient, `noise` the larger spread of the rounds."""
    prompt = min(_PROMPT, spec.context_length // 2)
    completion = min(_COMPLETION, spec.context_length - prompt)
    rates: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with ExitStack() as stack:
        engines = {}
        for lending in rates:
            engines[lending] = stack.enter_context(
                _Lone(pack_path, spec, groups, prompt + completion, step_tokens, kv, lending)
            )
            engines[lending].run(prompt, completion)
        for _ in range(rounds):
            for lending, engine in engines.items():
                rates[lending].append(engine.run(prompt, completion))
    rows = []
    for at, what in enumerate(("prefill", "decode")):
        lent, alone = ([rate[at] for rate in rates[lending]] for lending in (True, False))
        rows.append(
            {
                "what": what,
                "context": prompt,
                "workers": len(groups),
                "alone_tokens_per_s": round(median(alone), 1),
                "lent_tokens_per_s": round(median(lent), 1),
                "gain": round(median(lent) / median(alone), 2),
                "noise": round(max((max(column) - min(column)) / median(column) for column in (lent, alone)), 3),
            }
        )
    return rows


class _Lone(Started):
    """A running engine that gets one request at a time."""

    def __init__(
        self,
        pack_path: Path,
        spec: Any,
        groups: Sequence[CoreGroup],
        ctx: int,
        step_tokens: int,
        kv: str,
        lending: bool,
    ) -> None:
        from coremill.coordinator.engine import Engine

        arena = 2 * blocks_for(ctx) * ArenaGeometry.for_model(spec, 1, kv).block_bytes
        config = EngineConfig(
            max_active=1, ctx=ctx, arena=arena, kv=kv, step_tokens=step_tokens, prefix_cache=False, lending=lending
        )
        # Without stop ids the sequence runs to its full length.
        super().__init__(Engine(pack_path, config, groups, stop_ids=()))
        self._num_runs = 0

    def run(self, prompt: int, completion: int) -> tuple[float, float]:
        """Tokens per second of its prefill and of its decoding."""
        self._num_runs += 1
        ids = tuple(100 + (997 * self._num_runs + 31 * position) % 1000 for position in range(prompt))
        running = Running(self.engine, [SequenceRequest("bench", ids, completion, temperature=0.0)])
        running.wait()
        (result,) = running.results
        # The first token is chosen by the last step of the prefill.
        tick = time.get_clock_info("monotonic").resolution
        return prompt / max(result.prefill_s, tick), (completion - 1) / max(result.decode_s, tick)
