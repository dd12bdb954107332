"""Harm done to a run on purpose: workers killed at random, one stopped, the coordinator killed; until it is done."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

STUCK_AFTER = 3


@dataclass(slots=True)
class Figures:
    """What was done, and what the coordinators said of it (one text for each that ran)."""

    workers_killed: int = 0
    workers_stopped: int = 0
    coordinators_killed: int = 0
    seconds: float = 0.0
    said: list[str] = field(default_factory=list)


def workers_of(runs: Any) -> list[int]:
    """Ids of the living workers of a run."""
    found = []
    for pid in runs.processes():
        try:
            if any(word.endswith(".worker") for word in psutil.Process(pid).cmdline()):
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def is_watched(pid: int) -> bool:
    """Whether it has set up that it ends with its coordinator, even if stopped: the watching thread comes after that.

    Who is stopped before, in the first moments of its life, ends when it is continued.
    """
    try:
        return psutil.Process(pid).num_threads() > 1
    except psutil.NoSuchProcess:
        return False


def send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def disturb(
    runs: Any, num_rows: int, rng: random.Random, *, every: float, deaths: int, stop_at: float = 0.2
) -> Figures:
    """The command again and again until it ends by itself, whatever it ends with.

    every: seconds between two kills of a worker, twice as many after each that no row has come back since the one
    before, so that slow machines get somewhere. deaths: how often the coordinator is killed, at equal shares of
    the rows. stop_at: share of the rows after which a worker is stopped, once.
    """
    figures, begun = Figures(), time.monotonic()
    marks = [num_rows * (number + 1) / (deaths + 1) for number in range(deaths)]
    process = runs.start("--stuck-after", str(STUCK_AFTER))
    next_kill, pause, at_last_kill, stopped = begun + every, every, 0, None
    while process.poll() is None:
        time.sleep(0.02)
        now, finished = time.monotonic(), runs.num_rows()
        assert now < begun + 1800, "it never ends"
        if marks and finished >= marks[0]:
            marks.pop(0)
            process.kill()
            process.wait()
            figures.coordinators_killed += 1
            assert runs.processes_after_a_second() == [], "processes outlive their coordinator by a second"
            figures.said.append(process.communicate()[1])  # whoever is left would keep this open
            process = runs.start("--stuck-after", str(STUCK_AFTER))
        elif stopped is None and finished >= stop_at * num_rows and (alive := [*filter(is_watched, workers_of(runs))]):
            stopped = rng.choice(alive)
            figures.workers_stopped += send(stopped, signal.SIGSTOP)
        elif now >= next_kill and (alive := [pid for pid in workers_of(runs) if pid != stopped]):
            figures.workers_killed += send(rng.choice(alive), signal.SIGKILL)
            pause, at_last_kill = every if finished > at_last_kill else 2 * pause, finished
            next_kill = now + pause * rng.uniform(0.6, 1.4)
    figures.said.append(process.communicate()[1])
    figures.seconds = time.monotonic() - begun
    return figures


def judge(runs: Any, undisturbed: dict[str, bytes]) -> list[str]:
    """What is wrong with the results and with what lies around; empty when nothing is."""
    wrong = []
    made = runs.results()
    differing = sorted(name for name in undisturbed.keys() | made.keys() if made.get(name) != undisturbed.get(name))
    if differing:
        wrong.append(f"{len(differing)} results differ or are missing: {', '.join(differing[:5])}")
    if runs.errors.exists() and runs.errors.stat().st_size:
        wrong.append(f"rows were set aside: {runs.errors.read_text()[:500]}")
    if left := runs.processes_after_a_second():
        wrong.append(f"processes are left: {left}")
    if left := [path.name for path in runs.temporary.iterdir()]:
        wrong.append(f"files are left: {left}")
    return wrong
