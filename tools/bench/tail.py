"""`coremill bench tail`: whether all workers have something to do until the last row of a file is done.

Each round is a `coremill run` of rows of very uneven lengths, as a user starts it, watched from outside through the
workers' counters.

    makespan       from the input opened, all workers ready, until the last result is written
    work           time that workers spent in steps, over their number
    longest row    time that the row which took longest spent with workers, in its batch
    idle           share of the last tenth of the time in which a worker held nothing while another held two or more

Nobody can be faster than the larger of work and longest row; the makespan should be within a tenth of it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from coremill.config.counters import CounterPage, open_pages
from coremill.config.errors import EngineError
from coremill.config.settings import Settings
from coremill.tools.bench.rounds import how_it_ended, rested, steal_warned

NUM_ROWS, LENGTHS, TAIL = 40, (8, 24, 64, 200), 0.1
_SAMPLE_SECONDS = 0.002
_THINGS = "rivers salt winter bread clocks music harbours glass gardens letters engines birds".split()

# (time in seconds, sequences that each worker holds), as time goes by.
Samples = list[tuple[float, tuple[int, ...]]]


def uneven_rows(seed: int) -> list[dict[str, Any]]:
    """Chats of which some may get much longer than others."""
    rng = random.Random(seed)
    return [
        {
            "custom_id": f"row-{number}",
            "messages": [{"role": "user", "content": f"Tell me about {' and '.join(rng.sample(_THINGS, 3))}."}],
            "max_tokens": rng.choice(LENGTHS),
            "seed": number,
        }
        for number in range(NUM_ROWS)
    ]


def idle_at_the_end(samples: Samples, share: float = TAIL) -> list[float]:
    """Of the last `share` of the time in which anybody held something: for each worker, the part in which it held
    nothing while another held two or more. What a sample says holds until the next."""
    busy = [number for number, (_, held) in enumerate(samples) if any(held)]
    if not busy:
        return []
    last = min(busy[-1] + 1, len(samples) - 1)
    end = samples[last][0]
    begin = end - share * (end - samples[busy[0]][0])
    idle = [0.0] * len(samples[0][1])
    for (at, held), (until, _) in zip(samples[busy[0] : last], samples[busy[0] + 1 : last + 1], strict=True):
        span = max(0.0, until - max(at, begin))
        for worker, count in enumerate(held):
            idle[worker] += span * (count == 0 and max(held) >= 2)
    return [seconds / (end - begin) if end > begin else 0.0 for seconds in idle]


def figures(stats: dict[str, Any], results: Sequence[dict[str, Any]], samples: Samples) -> dict[str, Any]:
    """Of one round, from --stats, the lines of its results and what was seen meanwhile."""
    workers = stats["workers"]
    work = sum(worker["busy_seconds"] for worker in workers) / len(workers)
    longest = max(line["timing"]["prefill_seconds"] + line["timing"]["decode_seconds"] for line in results)
    return {
        "seconds": stats["seconds"],
        "work_seconds": work,
        "longest_row_seconds": longest,
        "ratio": stats["seconds"] / max(work, longest),
        "idle": idle_at_the_end(samples),
        "moved": stats["sequences"]["moved"],
    }


def run_once(rows: Sequence[dict[str, Any]], switches: Sequence[str]) -> dict[str, Any]:
    """One run in a folder of its own. EngineError when it fails."""
    with tempfile.TemporaryDirectory(prefix="coremill-bench-") as folder:
        given, out, stats = (Path(folder, name) for name in ("in.jsonl", "out.jsonl", "stats.json"))
        given.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [sys.executable, "-m", "coremill.tools", "run", str(given), "-o", str(out), "--stats", str(stats)]
        with open(Path(folder, "said"), "w+b") as said:
            process = subprocess.Popen(
                [*command, *switches], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said
            )
            samples = _watch(process)
            said.seek(0)
            if process.returncode or not stats.exists():
                raise EngineError(f"coremill run {how_it_ended(process.returncode, said.read())}")
        results = [json.loads(line) for line in out.read_bytes().splitlines()]
        return figures(json.loads(stats.read_text()), results, samples)


def _watch(process: subprocess.Popen) -> Samples:
    """What each worker holds, until the process ends."""
    samples: Samples = []
    pages: list[CounterPage] = []
    while process.poll() is None:
        if not samples:  # until there is something to see: pages are made one after another
            for page in pages:
                page.close()
            pages = _pages(process.pid)
        held = tuple(page["active"] for page in pages)
        if samples or any(held):
            samples.append((time.monotonic(), held))
        time.sleep(_SAMPLE_SECONDS)
    for page in pages:
        page.close()
    return samples


def _pages(pid: int) -> list[CounterPage]:
    try:
        return open_pages(pid)
    except OSError:  # it has just ended
        return []


def bench_tail(settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole measurement; `say` gets a line for each step."""
    rounds = settings["rounds"]
    switches = _switches(settings)
    cores = sorted(os.sched_getaffinity(0))
    report: dict[str, Any] = {"model": settings.require("model"), "rows": NUM_ROWS, "rounds": [], "warnings": []}
    say("warming the cache ...")
    run_once(uneven_rows(0)[:4], switches)
    for number in range(1, rounds + 1):
        quiet = rested(cores, f"round {number}", report["warnings"])
        report["rounds"].append(run_once(uneven_rows(number), switches))
        steal_warned(cores, quiet, f"round {number}", report["warnings"])
        say(f"round {number}: {_in_words(report['rounds'][-1])}")
    report["median_ratio"] = median(found["ratio"] for found in report["rounds"])
    report["most_idle"] = max((share for found in report["rounds"] for share in found["idle"]), default=0.0)
    say(
        f"median: {report['median_ratio']:.2f} x the larger of work and longest row; at most "
        f"{report['most_idle']:.0%} of a last tenth idle while another held two or more"
    )
    for warning in report["warnings"]:
        say(f"warning: {warning}")
    return report


def _switches(settings: Settings) -> list[str]:
    found = ["-m", settings.require("model")]
    for name in ("workers", "max_active"):
        if settings[name] is not None:
            found += [f"--{name.replace('_', '-')}", str(settings[name])]
    return found + ([] if settings["lending"] else ["--no-lending"])


def _in_words(found: dict[str, Any]) -> str:
    idle = ", ".join(f"{share:.0%}" for share in found["idle"])
    return (
        f"makespan {found['seconds']:.2f} s, work {found['work_seconds']:.2f} s a worker, longest row "
        f"{found['longest_row_seconds']:.2f} s: {found['ratio']:.2f} x the larger; idle at the end, by worker: {idle}; "
        f"{found['moved']} moved"
    )
