"""`coremill bench coordinator`: whether the coordinator keeps up with many workers.

    requests -> Engine: scheduler, sockets, processes, all real <-> make-believe workers (stubs.py), a few hubs of them

Nothing is computed, so what is measured is the coordinator: its CPU time for each message (nearly all of which tell of
one step of one worker), the scheduler's part of that, messages a second. CPU time does not depend on what else the hubs
do to the cores; messages a second do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from coremill.config.errors import EngineError
from coremill.config.formats import Q8_0
from coremill.config.settings import Settings
from coremill.tools.bench.running import TIMEOUT, Running, Started
from coremill.tools.bench.shapes import Shape, write_gguf
from coremill.tools.bench.stubs import placeholder_command
from coremill.tools.bench.text import columns

_COUNTS, _DEFAULT_WORKERS = (8, 64, 192), 192
# Rows for each place in a worker's batch, and their sizes: prompts that share nothing, completions of uneven length.
_ROWS_PER_PLACE, _PROMPT, _SHORTEST, _LONGEST = 3, 96, 32, 96
# The least that a model can be: the coordinator sees nothing of it but the size of a block.
_MODEL = Shape(1, 64, 1, 1, 64, 1024, 4096, 1e4, True, 64)
_TOKEN_BYTES = 2 * _MODEL.head_dim * 2  # K and V in f16
# Step times of the table of loads, in seconds.
_STEP_TIMES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


def bench_coordinator(settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole measurement as plain values."""
    from coremill.native.cache import ensure_pack

    most = settings["workers"] or _DEFAULT_WORKERS
    counts = [count for count in _COUNTS if count < most] + [most]
    rows = []
    with tempfile.TemporaryDirectory(prefix="coremill-bench-") as folder:
        source = Path(folder, "model.gguf")
        write_gguf(source, "nothing", _MODEL, Q8_0)
        pack = ensure_pack(source, cache_dir=folder)
        for count in counts:
            rows.append(_run(pack, Path(folder), count, settings["max_active"], settings["step_seconds"]))
            row = rows[-1]
            say(f"{count} workers: {row['messages_per_s']} messages/s, {row['cpu_us_per_message']} us of CPU for each")
    return {"sequences": settings["max_active"], "step_seconds": settings["step_seconds"], "coordinator": rows}


def _run(pack: Path, folder: Path, count: int, active: int, step_seconds: float) -> dict[str, Any]:
    from coremill.config.engine import EngineConfig
    from coremill.config.topology import CoreGroup
    from coremill.coordinator.engine import Engine

    cores = sorted(os.sched_getaffinity(0))
    groups = [CoreGroup((cores[index % len(cores)],)) for index in range(count)]
    num_hubs = min(count, max(1, len(cores) - 1))
    config = EngineConfig(
        max_active=active,
        ctx=_PROMPT + _LONGEST,
        # Twice what all places need: the rest holds what is cached.
        arena=2 * count * active * (_PROMPT + _LONGEST) * _TOKEN_BYTES,
        lending=False,  # the cores are not theirs
        stuck_after=TIMEOUT,
    )
    with ExitStack() as stack:
        fifos, results = stack.enter_context(_hubs(folder, num_hubs, step_seconds))
        engine = Engine(pack, config, groups, worker_command=placeholder_command(fifos, num_hubs), stop_ids=())
        stack.enter_context(Started(engine, f"{count} stubs"))
        clock = _SchedulerClock(engine)
        num_rows = count * active * _ROWS_PER_PLACE
        seconds, cpu, submitting = _answer_all(engine, num_rows)
    counts = sum((Counter(json.loads(Path(result).read_text())) for result in results), Counter())
    return _figures(count, num_rows, counts, clock, seconds, cpu, submitting)


@contextmanager
def _hubs(folder: Path, num_hubs: int, step_seconds: float) -> Iterator[tuple[str, list[str]]]:
    """Hubs that listen: (path of their FIFOs without the number, files that they write when the block has ended)."""
    fifos, results, processes, held = str(folder / "hub"), [], [], []
    try:
        for number in range(num_hubs):
            fifo, result = f"{fifos}{number}", str(folder / f"result{number}")
            os.mkfifo(fifo, 0o600)
            command = [sys.executable, "-P", "-m", "coremill.tools.bench.stubs", fifo, str(step_seconds), result]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL))
            if processes[-1].stdout.readline() != b"ready\n":
                raise EngineError(f"bench: a hub of stubs ended with code {processes[-1].wait()}")
            held.append(os.open(fifo, os.O_WRONLY))
            results.append(result)
        yield fifos, results
    finally:
        for fd in held:
            os.close(fd)
        for process in processes:
            process.wait()
            process.stdout.close()
        for number in range(len(processes)):
            os.unlink(f"{fifos}{number}")


class _SchedulerClock:
    """CPU time inside the scheduler, and its turns."""

    def __init__(self, engine: Any) -> None:
        self.nanoseconds = self.turns = self.events = 0
        scheduler = engine._shell.scheduler
        self._advance, scheduler.advance = scheduler.advance, self._timed

    def _timed(self, events: Any, now: float) -> Any:
        begin = time.thread_time_ns()
        instructions = self._advance(events, now)
        self.nanoseconds += time.thread_time_ns() - begin
        self.turns += 1
        self.events += len(events)
        return instructions


def _answer_all(engine: Any, num_rows: int) -> tuple[float, float, float]:
    """(seconds, CPU seconds of the coordinator's threads, CPU seconds of submitting)."""
    from coremill.config.request import SequenceRequest

    requests = [
        SequenceRequest(
            f"bench-{number}",
            tuple(6 + (number * 7919 + 31 * position + number // 1000) % 1000 for position in range(_PROMPT)),
            _SHORTEST + number * 37 % (_LONGEST - _SHORTEST + 1),
            temperature=0.0,
        )
        for number in range(num_rows)
    ]
    begin, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
    running = Running(engine, requests)
    submitting = time.thread_time() - own
    running.wait()
    seconds, spent = time.perf_counter() - begin, time.process_time() - cpu - (time.thread_time() - own)
    return seconds, spent, submitting


def _figures(
    count: int,
    num_rows: int,
    counts: Counter[str],
    clock: _SchedulerClock,
    seconds: float,
    cpu: float,
    submitting: float,
) -> dict[str, Any]:
    messages = counts["messages"]
    return {
        "workers": count,
        "rows": num_rows,
        "tokens": counts["decode_tokens"],
        "messages": messages,
        "bytes_per_message": round(counts["bytes"] / messages),
        "seconds": round(seconds, 3),
        "messages_per_s": round(messages / seconds),
        "cpu_us_per_message": round(1e6 * cpu / messages, 1),
        "scheduling_us_per_message": round(1e-3 * clock.nanoseconds / messages, 1),
        "cpu_us_per_token": round(1e6 * cpu / counts["decode_tokens"], 2),
        "tokens_per_message": round(counts["decode_tokens"] / messages, 1),
        "messages_per_turn": round(messages / clock.turns, 1),
        "submit_us_per_row": round(1e6 * submitting / num_rows, 1),
        "capacity_messages_per_s": round(messages / cpu),
    }


def coordinator_text(report: dict[str, Any]) -> str:
    rows = report["coordinator"]
    cells = [
        (
            str(row["workers"]),
            *(f"{row['messages_per_s']:,}", f"{row['capacity_messages_per_s']:,}", f"{row['cpu_us_per_message']:.1f}"),
            *(f"{row['scheduling_us_per_message']:.1f}", f"{row['tokens_per_message']:.1f}"),
            *(f"{row['cpu_us_per_token']:.2f}", f"{row['messages_per_turn']:.1f}", f"{row['submit_us_per_row']:.1f}"),
        )
        for row in rows
    ]
    head = (
        "workers",
        "messages/s",
        "at most",
        "us each",
        "scheduling",
        "tokens each",
        "us/token",
        "per turn",
        "submit",
    )
    note = (
        "  A message tells of one step of a worker, in which it chose that many tokens. us: microseconds of the\n"
        "  coordinator's CPU time. at most: messages a second at which it would use a whole core. per turn: messages\n"
        "  taken in at once. submit: us for each row, on the thread of whoever submits."
    )
    loads = [(f"{1e3 * step:g} ms", *(f"{100 * load(row, step):.1f}%" for row in rows)) for step in _STEP_TIMES]
    return (
        f"Coordinator, {report['sequences']} sequences a worker\n{columns(head, cells)}\n{note}\n\n"
        "Its load in shares of one core, by the time that a worker's step takes\n"
        + columns(("step", *(f"{row['workers']} workers" for row in rows)), loads)
        + "\n"
    )


def load(row: dict[str, Any], step_seconds: float) -> float:
    """Cores' worth of CPU that the coordinator needs while each of these workers takes a step in that time."""
    return row["workers"] / step_seconds * 1e-6 * row["cpu_us_per_message"]
