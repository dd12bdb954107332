"""`coremill bench workers`: throughput, time and CPU use over the number of workers.

Every round starts an engine for 1, 2, 4, ... workers, up to one for each core group, in turn: prompts of 512 tokens,
then decoding a full batch of each worker at context 128. A worker's batch stays the same, so twice the workers have
twice the work, and speed-up is tokens a second against one worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from coremill.config.settings import Settings
from coremill.tools.bench.text import columns

if TYPE_CHECKING:
    from coremill.tools.bench.engine import Rate
    from coremill.tools.bench.steps import Case

_PREFILL, _CONTEXT = 512, 128


def worker_counts(most: int) -> list[int]:
    """Powers of two below `most`, and `most`."""
    counts = [1]
    while counts[-1] * 2 < most:
        counts.append(counts[-1] * 2)
    return [*counts, most] if most > 1 else counts


def bench_workers(settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole measurement as plain values."""
    from coremill.config.topology import discover
    from coremill.native.cache import ensure_pack
    from coremill.native.packfile import open_pack
    from coremill.tools.bench.engine import EngineBench
    from coremill.tools.bench.rounds import rested

    groups = discover(workers=settings["workers"], cores_per_worker=settings["cores_per_worker"])
    cores = [core for group in groups for core in group.cores]
    counts, warnings = worker_counts(len(groups)), []
    with open_pack(ensure_pack(settings.require("model"))) as pack:
        cases = _cases(pack.spec.context_length, settings["max_active"])
        found: dict[tuple[int, str], list[Rate]] = {}
        for number in range(1, settings["rounds"] + 1):
            for count in counts[:: 1 if number % 2 else -1]:
                rested(cores, f"round {number}, {count} workers", warnings)
                engine = EngineBench(
                    pack.path, pack.spec, groups[:count], cases, settings["step_tokens"], settings["kv"]
                )
                with engine:
                    for case in cases:
                        rate = engine.run(case)
                        found.setdefault((count, case.label), []).append(rate)
                        say(f"round {number}, {count} workers, {case.label}: {rate.tokens_per_s:.1f} tokens/s")
        model = {"file": settings["model"], "name": pack.spec.name, "kv": settings["kv"]}
    rows = [_row(case, count, found, len(groups[0].cores)) for case in cases for count in counts]
    return {"model": model, "rounds": settings["rounds"], "workers": rows, "warnings": warnings}


def _cases(context_length: int, sequences: int) -> list[Case]:
    from coremill.tools.bench.limits import decode_shape
    from coremill.tools.bench.steps import Case

    prefill, context = min(_PREFILL, context_length), min(_CONTEXT, context_length - 1)
    return [
        Case("prefill", 1, prefill, (), prefill),
        Case("decode", sequences, context, (decode_shape(sequences, context),), sequences),
    ]


def _row(case: Case, count: int, found: dict[tuple[int, str], list[Rate]], cores_per_worker: int) -> dict[str, Any]:
    rates, alone = found[count, case.label], found[1, case.label]
    speed = median(rate.tokens_per_s for rate in rates)
    coordinator = sum(rate.coordinator_cpu for rate in rates)
    workers, seconds = sum(rate.workers_cpu for rate in rates), sum(rate.seconds for rate in rates)
    return {
        "what": case.what,
        "sequences": case.num_sequences,
        "context": case.context,
        "workers": count,
        "cores": count * cores_per_worker,
        "tokens_per_s": round(speed, 1),
        # Rounds take their turns, so each has its own quotient.
        "speedup": round(median(r.tokens_per_s / a.tokens_per_s for r, a in zip(rates, alone, strict=True)), 3),
        "ms_per_token": round(1e3 / speed, 4),
        "noise": round((max(r.tokens_per_s for r in rates) - min(r.tokens_per_s for r in rates)) / speed, 3),
        "busy_cores_workers": round(workers / seconds, 2),
        "busy_cores_coordinator": round(coordinator / seconds, 3),
        "coordinator_share": round(coordinator / (coordinator + workers), 4) if coordinator + workers else 0.0,
    }


def workers_text(report: dict[str, Any]) -> str:
    parts = [f"Model {report['model']['name']}, KV {report['model']['kv']}"]
    for what in ("prefill", "decode"):
        rows: Sequence[dict[str, Any]] = [row for row in report["workers"] if row["what"] == what]
        batch, context = rows[0]["sequences"], rows[0]["context"]
        title = f"Prefill of {context}" if what == "prefill" else f"Decode, {batch} x {context}"
        cells = [
            (
                str(row["workers"]),
                *(f"{row['tokens_per_s']:.0f}", f"{row['ms_per_token']:.3f}", f"{row['speedup']:.2f}"),
                *(f"{row['busy_cores_workers']:.2f}", f"{row['busy_cores_coordinator']:.3f}"),
                *(f"{row['coordinator_share']:.1%}", f"{row['noise']:.0%}" if report["rounds"] > 1 else "-"),
            )
            for row in rows
        ]
        head = ("workers", "t/s", "ms/token", "speed-up", "cores: workers", "coordinator", "its share", "noise")
        parts.append(f"{title}\n{columns(head, cells)}")
    parts.append(
        "  t/s: tokens a second, median of the rounds. cores: CPU seconds a second. its share: of all CPU time."
    )
    parts += [f"Warning: {warning}." for warning in report["warnings"]]
    return "\n\n".join(parts) + "\n"
