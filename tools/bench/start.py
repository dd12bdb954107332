"""`coremill bench start`: how soon a fresh process generates its first token, and what one more worker costs.

Every figure comes from `coremill run` as a user starts it, in fresh processes each round; medians are over rounds.
One run before the first round is not counted: it packs the model if need be, and reads it into the page cache.

    first token    from just before exec until the result of a row with one token to generate is in the file
    extra worker   PSS of the workers of a run with two, less that of a run with one, from --stats; of this:
                   scratch   what steps compute in, printed by `inspect`
                   KV        what more of the arena is filled
                   own       the rest: interpreter, libraries, bytes of the tokens
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

from coremill.config.errors import EngineError
from coremill.config.settings import Settings
from coremill.config.topology import survey
from coremill.tools.bench.rounds import how_it_ended, rested

# Enough rows for two workers with all their sequences, of some length each.
_NUM_ROWS, _ROW_WORDS = 48, 60
_POLL_SECONDS = 0.0005


class Command:
    """`coremill run` of one model in a folder of its own."""

    def __init__(self, model: str, folder: Path) -> None:
        self._model, self._folder = model, folder

    def run(self, rows: Sequence[dict[str, Any]], *options: str) -> tuple[float, dict[str, Any]]:
        """(seconds from exec until the first result line is in the file, --stats). EngineError when it fails."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            given, out, stats = (Path(folder, name) for name in ("in.jsonl", "out.jsonl", "stats.json"))
            given.write_text("".join(json.dumps(row) + "\n" for row in rows))
            command = [sys.executable, "-m", "coremill.tools", "run", str(given), "-m", self._model]
            command += ["-o", str(out), "--stats", str(stats), *options]
            begin = time.monotonic()
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            while process.poll() is None and not _has_bytes(out):
                time.sleep(_POLL_SECONDS)
            first = time.monotonic() - begin
            said = process.communicate()[1]
            if process.returncode or not stats.exists():
                raise EngineError(f"coremill run {how_it_ended(process.returncode, said)}")
            return first, json.loads(stats.read_text())


def _has_bytes(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def first_token(command: Command) -> dict[str, float]:
    """Seconds from exec until all workers were ready, and until the first token was in the result file."""
    row = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
    seconds, stats = command.run([row])
    return {"ready_seconds": stats["startup_seconds"], "first_token_seconds": seconds}


def extra_worker(command: Command) -> dict[str, float]:
    """Bytes of PSS that a second worker adds, and their parts."""
    words = " ".join(str(number) for number in range(_ROW_WORDS))
    rows = [
        {"custom_id": str(number), "prompt": f"{number} {words}", "max_tokens": 8, "temperature": 0}
        for number in range(_NUM_ROWS)
    ]
    one, two = (_memory(command.run(rows, "--workers", str(workers))[1]) for workers in (1, 2))
    pss, scratch, kv = (two[name] - one[name] for name in ("pss_bytes", "scratch_bytes", "pss_arena_bytes"))
    return {"pss_bytes": pss, "scratch_bytes": scratch, "kv_bytes": kv, "own_bytes": pss - scratch - kv}


def _memory(stats: dict[str, Any]) -> dict[str, int]:
    names = ("pss_bytes", "scratch_bytes", "pss_arena_bytes")
    return {name: sum(worker[name] for worker in stats["workers"]) for name in names}


def bench_start(settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole measurement; `say` gets a line for each step."""
    model, rounds = settings.require("model"), settings["rounds"]
    measures: list[Callable[[Command], dict[str, float]]] = [first_token]
    report: dict[str, Any] = {"model": model, "rounds": [], "median": {}, "warnings": []}
    if survey().budget < 2:
        report["warnings"].append("only one core may be used, so the cost of a second worker was not measured")
    else:
        measures.append(extra_worker)
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="coremill-bench-") as folder:
        command = Command(model, Path(folder))
        say("warming the cache ...")
        first_token(command)
        for number in range(1, rounds + 1):
            rested(cores, f"round {number}", report["warnings"], patience=1)
            found = {name: value for measure in measures for name, value in measure(command).items()}
            report["rounds"].append(found)
            say(f"round {number}: {_in_words(found)}")
    report["median"] = {name: median(found[name] for found in report["rounds"]) for name in report["rounds"][0]}
    say(f"median: {_in_words(report['median'])}")
    for warning in report["warnings"]:
        say(f"warning: {warning}")
    return report


def _in_words(found: dict[str, float]) -> str:
    text = f"from exec to ready {found['ready_seconds']:.2f} s, to the first token {found['first_token_seconds']:.2f} s"
    if "pss_bytes" in found:
        pss, scratch, kv, own = (found[f"{name}_bytes"] / 1e6 for name in ("pss", "scratch", "kv", "own"))
        text += f"; a second worker adds {pss:.1f} MB PSS = {scratch:.1f} scratch + {kv:.1f} KV + {own:.1f} own"
    return text
