"""`coremill bench queue`: what the Python interface costs, beside the engine that it stands in front of.

    first step   from submit() to the result of a job of one token, less the time its steps take; workers wait for work
    map          10,000 tiny jobs through Coordinator.map against `coremill run` on the same rows, in turns
    CPU share    of the coordinator's process in all CPU time, for those and for chats of usual length; the helper that
                 tokenises is shown beside it
    urgent       a job of 200 tokens of higher priority beside 30 that run, against the same on an idle engine

All of it on one machine at one time, so that what counts are the ratios; medians are over rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from coremill.config.cputimes import cpu_seconds
from coremill.config.errors import EngineError
from coremill.config.settings import Settings
from coremill.coordinator import Coordinator
from coremill.tools.bench.rounds import how_it_ended, rested

NUM_TINY, NUM_USUAL, USUAL_TOKENS = 10_000, 64, 120
NUM_SINGLES = 50
NUM_BACKGROUND, BACKGROUND_TOKENS, URGENT_TOKENS = 30, 2000, 200

Row = dict[str, Any]


def tiny_rows() -> list[Row]:
    return [{"prompt": f"Number {number} is", "max_tokens": 2, "temperature": 0} for number in range(NUM_TINY)]


def usual_rows() -> list[Row]:
    ask = "Write a short story about a lighthouse, number {}."
    return [
        {"messages": [{"role": "user", "content": ask.format(number)}], "max_tokens": USUAL_TOKENS, "seed": number}
        for number in range(NUM_USUAL)
    ]


def first_steps(coordinator: Coordinator, count: int) -> dict[str, float]:
    """Milliseconds from submit() to the result without the steps in between: medians for a text, and for token ids,
    which need no tokenising."""
    found = {}
    for name, given in (("text", {"prompt": "The capital of France is"}), ("ids", {"prompt_ids": [504, 2988, 314]})):
        spent = []
        for number in range(count):
            busy = _busy_seconds(coordinator)
            begin = time.monotonic()
            coordinator.submit(**given, max_tokens=1, seed=number).result()
            total = time.monotonic() - begin
            spent.append(1000 * (total - (_busy_seconds(coordinator) - busy)))
        found[name] = median(spent)
    return found


def _busy_seconds(coordinator: Coordinator) -> float:
    return sum(worker["busy_seconds"] for worker in coordinator.stats()["workers"])


def map_rows(coordinator: Coordinator, rows: Sequence[Row]) -> dict[str, Any]:
    """Seconds of a map over the rows, and who spent how much CPU time."""
    stats = coordinator.stats()
    workers = [worker["pid"] for worker in stats["workers"] if worker["pid"]]
    helpers = [child.pid for child in psutil.Process().children() if child.pid not in workers]
    before = (time.process_time(), _cpu_seconds(helpers), _cpu_seconds(workers))
    begin = time.monotonic()
    num_tokens = sum(result.usage.completion_tokens for result in coordinator.map(rows, ordered=False))
    seconds = time.monotonic() - begin
    after = (time.process_time(), _cpu_seconds(helpers), _cpu_seconds(workers))
    own, helping, working = (late - early for early, late in zip(before, after, strict=True))
    whole = own + helping + working
    return {
        "seconds": seconds,
        "completion_tokens": num_tokens,
        "coordinator_share": own / whole,
        "helper_share": helping / whole,
    }


def _cpu_seconds(pids: Sequence[int]) -> float:
    return sum(map(cpu_seconds, pids))


def run_rows(rows: Sequence[Row], switches: Sequence[str]) -> float:
    """Seconds that `coremill run` takes for them, all workers ready, until the last result is written."""
    with tempfile.TemporaryDirectory(prefix="coremill-bench-") as folder:
        given, out, stats = (Path(folder, name) for name in ("in.jsonl", "out.jsonl", "stats.json"))
        given.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [sys.executable, "-m", "coremill.tools", "run", str(given), "-o", str(out), "--stats", str(stats)]
        done = subprocess.run([*command, *switches], stdin=subprocess.DEVNULL, capture_output=True)
        if done.returncode or not stats.exists():
            raise EngineError(f"coremill run {how_it_ended(done.returncode, done.stderr)}")
        return json.loads(stats.read_text())["seconds"]


def urgent(coordinator: Coordinator) -> dict[str, float]:
    """Seconds of an urgent job alone, and beside others; how many of their tokens had to be computed again."""
    alone = _urgent_seconds(coordinator)
    recomputed = coordinator.stats()["sequences"]["recomputed_tokens"]
    jobs = [
        coordinator.submit(f"{number} reasons to get up early:", max_tokens=BACKGROUND_TOKENS, seed=number)
        for number in range(NUM_BACKGROUND)
    ]
    for job in jobs:
        next(iter(job), None)  # it runs
    unfinished = sum(not job.done() for job in jobs)
    beside = _urgent_seconds(coordinator)
    recomputed = coordinator.stats()["sequences"]["recomputed_tokens"] - recomputed
    coordinator.cancel_all()
    coordinator.drain()
    return {
        "alone_seconds": alone,
        "beside_seconds": beside,
        "ratio": beside / alone,
        "allowed_ratio": 1.5 + 0.1 / alone,
        "background": unfinished,
        "recomputed_tokens": recomputed,
    }


def _urgent_seconds(coordinator: Coordinator) -> float:
    """Of one that uses all of its tokens: it is asked for as often as another one ends early."""
    for seed in range(100):
        begin = time.monotonic()
        done = coordinator.submit(
            "A long list of numbers: 1, 2, 3,", max_tokens=URGENT_TOKENS, seed=seed, priority=1
        ).result()
        if done.usage.completion_tokens == URGENT_TOKENS:
            return time.monotonic() - begin
    raise EngineError(f"the model never writes {URGENT_TOKENS} tokens: nothing can be measured")


def bench_queue(settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole measurement; `say` gets a line for each step."""
    cores = sorted(os.sched_getaffinity(0))
    model = settings.require("model")
    report: dict[str, Any] = {"model": model, "rounds": [], "warnings": []}
    options = {} if settings["workers"] is None else {"workers": settings["workers"]}
    switches = ["-m", model, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    tiny, usual = tiny_rows(), usual_rows()
    for number in range(1, settings["rounds"] + 1):
        rested(cores, f"round {number}", report["warnings"])
        found: dict[str, Any] = {}
        if number % 2:
            found["run_seconds"] = run_rows(tiny, switches)
        with Coordinator(model, **options) as coordinator:
            coordinator.wait_ready()
            found["tiny"] = map_rows(coordinator, tiny)
            found["usual"] = map_rows(coordinator, usual)
            found["first_step_ms"] = first_steps(coordinator, NUM_SINGLES)
            found["urgent"] = urgent(coordinator)
        if not number % 2:
            found["run_seconds"] = run_rows(tiny, switches)
        found["map_ratio"] = found["run_seconds"] / found["tiny"]["seconds"]
        report["rounds"].append(found)
        say(f"round {number}: {_in_words(found)}")
    report["median"] = _medians(report["rounds"])
    say(f"median: {_in_words(report['median'])}")
    for warning in report["warnings"]:
        say(f"warning: {warning}")
    return report


def _medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of every number, wherever it stands."""
    merged: dict[str, Any] = {}
    for name, value in rounds[0].items():
        values = [found[name] for found in rounds]
        merged[name] = _medians(values) if isinstance(value, dict) else median(values)
    return merged


def _in_words(found: dict[str, Any]) -> str:
    urgent, tiny, usual, first = found["urgent"], found["tiny"], found["usual"], found["first_step_ms"]
    return "; ".join(
        (
            f"first step {first['text']:.1f} ms after submit, {first['ids']:.1f} ms with token ids",
            f"map at {found['map_ratio']:.1%} of the batch runner's throughput",
            f"of chats' CPU time coordinator {usual['coordinator_share']:.1%}, helper {usual['helper_share']:.1%}",
            f"of tiny jobs' {tiny['coordinator_share']:.1%} and {tiny['helper_share']:.1%}",
            f"urgent beside {urgent['background']:.0f} others {urgent['ratio']:.2f} x its time alone "
            f"({urgent['allowed_ratio']:.2f} allowed), {urgent['recomputed_tokens']:.0f} tokens computed again",
        )
    )
