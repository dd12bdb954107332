"""Steps of a model in this process, on one core: how long each operation takes against its limit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from coremill.config.arena import ArenaGeometry, blocks_for
from coremill.tools.bench.limits import StepLimits, StepShape

if TYPE_CHECKING:
    from coremill.native.packfile import PackFile
    from coremill.worker.model import WorkerModel

# Any token will do: time does not depend on it. Not 0, which is often a control token.
_TOKEN = 100


@dataclass(frozen=True, slots=True)
class Case:
    """Something to measure: `steps` follow each other, and count as `num_tokens` tokens."""

    what: str  # "prefill", "decode"
    num_sequences: int
    context: int
    steps: tuple[StepShape, ...]
    num_tokens: int

    @property
    def label(self) -> str:
        if self.what == "prefill":
            return f"prefill of {self.context}"
        return f"decode, {self.num_sequences} x context {self.context}"


@dataclass(slots=True)
class Measured:
    """Seconds of the whole case, one per round, and of each operation of the plan, per round."""

    seconds: list[float] = field(default_factory=list)
    operations: list[list[float]] = field(default_factory=list)

    @property
    def noise(self) -> float:
        """Spread of the rounds, relative to their median."""
        return (max(self.seconds) - min(self.seconds)) / median(self.seconds)


class StepBench:
    """A model in this process with room for the largest case. Everything runs on the calling thread, which the
    caller has pinned."""

    def __init__(self, pack: PackFile, cases: Sequence[Case], num_blocks: int, kv: str) -> None:
        import os

        from coremill.native.arena import create_arena, map_arena
        from coremill.worker.model import WorkerModel

        geometry = ArenaGeometry.for_model(pack.spec, num_blocks, kv)
        fd = create_arena(geometry)
        self._arena = map_arena(fd, geometry)
        os.close(fd)
        shapes = [shape for case in cases for shape in case.steps]
        self.model: WorkerModel = WorkerModel(
            pack,
            self._arena,
            max_step_tokens=max(shape.num_rows for shape in shapes),
            max_sequences=max(len(shape.spans) for shape in shapes),
            profile=True,
        )
        self._batch = self.model.new_batch()

    @staticmethod
    def blocks_needed(cases: Sequence[Case]) -> int:
        return max(sum(blocks_for(end) for _, end in shape.spans) for case in cases for shape in case.steps)

    def run(self, case: Case, seconds: float) -> tuple[float, list[float]]:
        """Seconds of the case and of each operation in it: means over repetitions that take about `seconds`."""
        self._once(case)
        before = self.model.profile()
        begin = time.perf_counter()
        count = 0
        while count == 0 or time.perf_counter() - begin < seconds:
            self._once(case)
            count += 1
        total = (time.perf_counter() - begin) / count
        after = self.model.profile()
        return total, [(b.seconds - a.seconds) / count for a, b in zip(before, after, strict=True)]

    def _once(self, case: Case) -> None:
        from coremill.worker.batch import SampleSpec

        for shape in case.steps:
            self._batch.clear()
            first_block = 0
            for index, (rows, end) in enumerate(shape.spans):
                num_blocks = blocks_for(end)
                sample = SampleSpec() if index < shape.num_outputs else None
                blocks = range(first_block, first_block + num_blocks)
                self._batch.add([_TOKEN] * rows, end - rows, blocks, sample)
                first_block += num_blocks
            self.model.step(self._batch)

    def close(self) -> None:
        self.model.close()
        self._arena.close()


def measure_steps(bench: StepBench, cases: Sequence[Case], rounds: int, seconds: float) -> list[Measured]:
    """Every case once per round, so that a slow minute of the machine falls on all."""
    results = [Measured() for _ in cases]
    for _ in range(rounds):
        for case, result in zip(cases, results, strict=True):
            total, operations = bench.run(case, seconds)
            result.seconds.append(total)
            result.operations.append(operations)
    return results


def step_report(case: Case, result: Measured, limits: StepLimits) -> dict[str, Any]:
    """Rates and shares of a case; operations of all layers together, in plan order."""
    groups: dict[str, list[float]] = {}
    columns = list(zip(*result.operations, strict=True))
    for op, column in zip(limits.plan.ops, columns, strict=True):
        layer, dot, name = op.label.partition(".")
        group = groups.setdefault(name if dot and layer.isdecimal() else op.label, [0.0, 0.0])
        group[0] += median(column)
        group[1] += sum(limits.seconds(op, shape) for shape in case.steps)
    seconds = median(result.seconds)
    least = sum(limit for _, limit in groups.values())
    return {
        "what": case.what,
        "sequences": case.num_sequences,
        "context": case.context,
        "workers": 1,
        "tokens_per_s": round(case.num_tokens / seconds, 1),
        "limit_tokens_per_s": round(case.num_tokens / least, 1),
        "share": round(least / seconds, 3),
        "noise": round(result.noise, 3),
        "operations": [
            {
                "operation": name,
                "ms": round(1e3 * spent, 4),
                "limit_ms": round(1e3 * limit, 4),
                "share": round(limit / spent, 3) if spent else None,
            }
            for name, (spent, limit) in groups.items()
        ],
    }
