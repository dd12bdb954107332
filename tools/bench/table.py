"""The table of `coremill bench`: the machine's ceilings, a model's operations against them, whole steps and engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from coremill.config.settings import Settings

if TYPE_CHECKING:
    from coremill.config.topology import CoreGroup
    from coremill.native.packfile import PackFile
    from coremill.tools.bench.limits import StepLimits
    from coremill.tools.bench.steps import Case
    from coremill.tools.machine import Ceilings

_GEMM_TOKENS = (1, 8, 16, 64, 128)
_SEQUENCES, _CONTEXTS, _PREFILL = (1, 2, 4, 8, 16, 32), (128, 700), 512
# One long document, and one batch at more contexts.
_DOCUMENT, _LONG_CONTEXTS, _LONG_SEQUENCES = 1800, (256, 1024, 2048, 4096), 16
_QUICK_SEQUENCES, _QUICK_CONTEXTS = (1, 8, 16), (128,)
# Seconds of one measurement of a step, and of a ceiling.
_STEP_SECONDS, _QUICK_STEP_SECONDS = 0.5, 0.2
_CEILING_SECONDS, _QUICK_CEILING_SECONDS = 0.25, 0.1
# Above these, the figures carry a warning.
_MUCH_NOISE, _MUCH_STEAL, _TOO_MUCH = 0.10, 0.02, 1.05


def bench(settings: Settings, say: Callable[[str], None], model: str | None = None) -> dict[str, Any]:
    """The whole report, as plain values, on `model` or else --model; nothing but ceilings with --roofline."""
    from coremill.config.topology import discover
    from coremill.tools import machine

    quick = settings["quick"]
    rounds = 1 if quick and not settings.given("rounds") else settings["rounds"]
    groups = discover(workers=settings["workers"], cores_per_worker=settings["cores_per_worker"])
    load = machine.load_average()
    only_ceilings = model is None and settings["roofline"]
    pack = None if only_ceilings else _open_model(model or settings.require("model"))
    try:
        say("measuring the machine ...")
        ceilings = machine.measure_ceilings(
            groups, seconds=_QUICK_CEILING_SECONDS if quick else _CEILING_SECONDS, rounds=rounds
        )
        report: dict[str, Any] = {"machine": ceilings.as_dict() | {"load": load}, "rounds": rounds}
        if pack is not None:
            _bench_model(report, pack, groups, ceilings, settings, rounds, say)
    finally:
        if pack is not None:
            pack.close()
    report["warnings"] = _warnings(report)
    return report


def _open_model(model: str) -> PackFile:
    from coremill.native.cache import ensure_pack
    from coremill.native.packfile import open_pack

    return open_pack(ensure_pack(model))


def _bench_model(
    report: dict[str, Any],
    pack: PackFile,
    groups: Sequence[CoreGroup],
    ceilings: Ceilings,
    settings: Settings,
    rounds: int,
    say: Callable[[str], None],
) -> None:
    from coremill.config.arena import ArenaGeometry
    from coremill.coordinator.storage import streamed_bytes
    from coremill.tools import machine
    from coremill.tools.bench.limits import GemmRates

    quick = settings["quick"]
    spec = pack.spec
    report["model"] = {
        "file": pack.path.name if settings.get("model") is None else settings["model"],
        "name": spec.name,
        "architecture": spec.architecture,
        "weight_bytes": pack.data_length,
        "streamed_bytes": streamed_bytes(pack),
        "kv_token_bytes": ArenaGeometry.for_model(spec, 1, settings["kv"]).token_bytes,
        "key": pack.key,
        "kv": settings["kv"],
    }
    gemm = GemmRates(ceilings.cores[0], machine.active_isa())
    say("measuring matrix products ...")
    report["gemm"] = gemm_table(pack, gemm, ceilings, _GEMM_TOKENS[:3] if quick else _GEMM_TOKENS)
    chosen = cases(spec.context_length, settings["step_tokens"], quick=quick)
    chosen, report["left_out"] = _fitting(chosen, pack, len(groups), settings["kv"])
    say("measuring steps of one worker ...")
    limits, report["one_worker"] = machine.on_cores(
        ceilings.cores[:1], lambda: _one_worker(pack, chosen, gemm, ceilings, settings, rounds, say)
    )[0]
    report["all_workers"] = _all_workers(pack, chosen, groups, limits, ceilings, settings, rounds, say)
    if len(groups) > 1:
        from coremill.tools.bench.lone import lone_report

        say("measuring a sequence alone ...")
        report["lone"] = lone_report(pack.path, spec, groups, rounds, settings["step_tokens"], settings["kv"])


def cases(context_length: int, step_tokens: int, *, quick: bool) -> list[Case]:
    """What is measured: one prompt, then decoding; contexts a model does not have are left out."""
    from coremill.tools.bench.limits import prefill_shapes
    from coremill.tools.bench.steps import Case

    prefill = min(_PREFILL, context_length)
    found = [Case("prefill", 1, prefill, tuple(prefill_shapes(prefill, step_tokens)), prefill)]
    for context in _QUICK_CONTEXTS if quick else _CONTEXTS:
        if context < context_length:
            for count in _QUICK_SEQUENCES if quick else _SEQUENCES:
                found.append(_decode(count, context))
    if not quick:
        if context_length > _DOCUMENT:
            found.insert(1, Case("prefill", 1, _DOCUMENT, tuple(prefill_shapes(_DOCUMENT, step_tokens)), _DOCUMENT))
        found += [_decode(_LONG_SEQUENCES, context) for context in _LONG_CONTEXTS if context < context_length]
    return found


def _decode(count: int, context: int) -> Case:
    from coremill.tools.bench.limits import decode_shape
    from coremill.tools.bench.steps import Case

    return Case("decode", count, context, (decode_shape(count, context),), count)


def _fitting(chosen: Sequence[Case], pack: PackFile, num_workers: int, kv: str) -> tuple[list[Case], list[str]]:
    """Cases whose KV cache fits half of the memory that the weights leave, and the labels of the others."""
    from coremill.config.arena import ArenaGeometry
    from coremill.config.memory import ARENA_SHARE, memory_budget
    from coremill.tools.bench.engine import arena_blocks

    memory = memory_budget()
    if memory is None:
        return list(chosen), []
    room = (memory.available - pack.data_length) * ARENA_SHARE / ArenaGeometry.for_model(pack.spec, 1, kv).block_bytes
    fits = [case for case in chosen if arena_blocks([case], num_workers) <= room]
    return fits, [case.label for case in chosen if case not in fits]


def gemm_table(pack: PackFile, gemm: Any, ceilings: Ceilings, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Each distinct matrix of the model: rate, and its share of its format's own kernel and of bare dots."""
    from coremill.config.formats import FORMATS
    from coremill.tools.bench.limits import format_rows

    rows, seen = [], set()
    for name, matrix in pack.matrices.items():
        kind = (matrix.n, matrix.k, tuple(format_rows(matrix).items()))
        if kind in seen:
            continue
        seen.add(kind)
        for num_tokens in tokens:
            rate = gemm.matrix(matrix, num_tokens)
            hot = matrix.num_panels * 16 * matrix.k * num_tokens / gemm.matrix_limit(matrix, num_tokens)
            rows.append(
                {
                    "matrix": name,
                    "n": matrix.n,
                    "k": matrix.k,
                    "formats": [FORMATS[type_id].name for type_id in format_rows(matrix)],
                    "tokens": num_tokens,
                    "gops": round(2e-9 * rate, 1),
                    "share_of_kernel": round(rate / hot, 3),
                    "share_of_dot": round(rate / ceilings.dot_macs_one, 3),
                    "kernel_share_of_dot": round(hot / ceilings.dot_macs_one, 3),
                }
            )
    return rows


def _one_worker(
    pack: PackFile,
    chosen: Sequence[Case],
    gemm: Any,
    ceilings: Ceilings,
    settings: Settings,
    rounds: int,
    say: Callable[[str], None],
) -> tuple[StepLimits, list[dict[str, Any]]]:
    from coremill.tools.bench.limits import StepLimits
    from coremill.tools.bench.steps import StepBench, measure_steps, step_report

    bench = StepBench(pack, chosen, StepBench.blocks_needed(chosen), settings["kv"])
    try:
        seconds = _QUICK_STEP_SECONDS if settings["quick"] else _STEP_SECONDS
        results = measure_steps(bench, chosen, rounds, seconds)
        plan = bench.model.plan
    finally:
        bench.close()
    limits = StepLimits.measured(pack, plan, gemm, ceilings, _CEILING_SECONDS, settings["kv"])
    reports = []
    for case, result in zip(chosen, results, strict=True):
        reports.append(step_report(case, result, limits))
        say(f"  {case.label}: {reports[-1]['tokens_per_s']} tokens/s")
    return limits, reports


def _all_workers(
    pack: PackFile,
    chosen: Sequence[Case],
    groups: Sequence[CoreGroup],
    limits: StepLimits,
    ceilings: Ceilings,
    settings: Settings,
    rounds: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    from coremill.tools.bench.engine import EngineBench, engine_report

    say(f"measuring the engine with {len(groups)} workers ...")
    rates: list[list[float]] = [[] for _ in chosen]
    with EngineBench(pack.path, pack.spec, groups, chosen, settings["step_tokens"], settings["kv"]) as engine:
        for _ in range(rounds):
            for case, column in zip(chosen, rates, strict=True):
                column.append(engine.run(case).tokens_per_s)
                say(f"  {case.label}: {column[-1]:.1f} tokens/s")
    busy = limits.with_all_busy(ceilings, _CEILING_SECONDS)
    # A group of several cores shares each operation; its limit is that of its cores together.
    cores_per_group = len(groups[0].cores)
    reports = []
    for case, column in zip(chosen, rates, strict=True):
        least = sum(busy.step_seconds(shape) for shape in case.steps) / cores_per_group
        reports.append(engine_report(case, column, len(groups), least))
    return reports


def _warnings(report: dict[str, Any]) -> list[str]:
    from coremill.tools.machine import disturbances

    found = []
    steal = report["machine"]["steal"]
    if steal > _MUCH_STEAL:
        found.append(f"the hypervisor took {steal:.1%} of the time while the ceilings were measured")
    found += disturbances(report["machine"]["load"], report["machine"])
    if report.get("left_out"):
        found.append(f"left out, as their KV cache would not fit in memory: {'; '.join(report['left_out'])}")
    rows = [*report.get("one_worker", ()), *report.get("all_workers", ())]
    noisy = [row for row in rows if row["noise"] > _MUCH_NOISE]
    if noisy:
        worst = max(row["noise"] for row in noisy)
        found.append(
            f"{len(noisy)} of {len(rows)} figures varied by more than {_MUCH_NOISE:.0%} between rounds (worst"
            f" {worst:.0%}): something else was running"
        )
    if any(row.get("share", 0) > _TOO_MUCH for row in rows):
        found.append("shares above 100%: the limits were measured while the machine was slower than later")
    return found
