"""Real rows while processes are killed at any time, and what is left of them: nothing.

tests/batch/test_real.py kills by hand-picked moments; here the moments are drawn, also from the time before the
first row, and every process is found by a mark in its environment, not by its parents.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def rows(workload):
    """Chats and labels, greedy and sampled; some seconds of work."""
    chats, labels = workload("write")[:28], workload("label")[:12]
    for number, row in enumerate(chats):
        row["body"] |= {"max_tokens": 20 + number, "temperature": number % 3 / 2}
    return [*chats[:14], *labels, *chats[14:]]


@pytest.fixture(scope="module")
def undisturbed(rows, make_runs):
    return make_runs().fresh(rows)


@pytest.fixture
def runs(rows, make_runs):
    made = make_runs()
    made.write(rows)
    return made


def roles(runs) -> dict[str, list[psutil.Process]]:
    """The living processes of a run by what they do."""
    found: dict[str, list[psutil.Process]] = {"worker": [], "helper": [], "coordinator": []}
    for pid in runs.processes():
        try:
            words = psutil.Process(pid).cmdline()
        except psutil.NoSuchProcess:
            continue
        role = next((r for r in ("worker", "helper") if words and any(w.endswith(f".{r}") for w in words)), None)
        found[role or "coordinator"].append(psutil.Process(pid))
    return found


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


def wait_until(process, seconds: float, runs, num_rows: int) -> bool:
    """So many seconds have passed and so many rows are there; False when the run ended before."""
    begun = time.monotonic()
    while time.monotonic() < begun + seconds or runs.num_rows() < num_rows:
        if process.poll() is not None:
            return False
        assert time.monotonic() < begun + 120
        time.sleep(0.002)
    return True


def assert_nothing_left(runs, shared_before: set[str]) -> None:
    assert runs.processes_after_a_second() == []
    assert list(runs.temporary.iterdir()) == []
    assert set(os.listdir(SHARED_MEMORY)) <= shared_before
    assert {path.name for path in runs.folder.iterdir()} <= {"in.jsonl", "out.jsonl", "out.jsonl.journal", "stats.json"}


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_time(runs, rows, undisturbed, seed):
    """The coordinator, the text helper, workers, or all at once, seven times over; then the same command ends it."""
    rng = random.Random(seed)
    shared_before = set(os.listdir(SHARED_MEMORY))
    for number in range(7):
        process = runs.start()
        # The first kills fall into the start, later ones behind rows.
        seconds, num_rows = rng.uniform(0, 0.8), runs.num_rows() + rng.randint(1, 4) if number > 2 else 0
        if wait_until(process, seconds, runs, num_rows):
            found = roles(runs)
            victims = rng.choice([["coordinator"], ["worker", "helper", "coordinator"], ["coordinator", "worker"]])
            kill([each for role in victims for each in found[role]])
        process.communicate()
        assert runs.processes_after_a_second() == []
    runs.run()
    assert runs.results() == undisturbed
    assert not runs.errors.exists()
    assert_nothing_left(runs, shared_before)


def test_workers_and_helper_killed_while_the_run_goes_on(runs, rows, undisturbed):
    """Only the coordinator survives, and it ends the run by itself."""
    rng = random.Random(9)
    shared_before = set(os.listdir(SHARED_MEMORY))
    process = runs.start()
    num_killed = 0
    while wait_until(process, rng.uniform(0.1, 0.4), runs, runs.num_rows() + 1) and num_killed < 6:
        found = roles(runs)
        victims = [rng.choice(found["worker"])] if found["worker"] else []
        kill(victims + found["helper"])
        num_killed += len(victims)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    assert num_killed >= 2 and said.count("died: killed by SIGKILL") == num_killed
    assert runs.results() == undisturbed
    assert not runs.errors.exists()
    assert_nothing_left(runs, shared_before)
