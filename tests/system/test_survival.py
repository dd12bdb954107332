"""The command while workers, its model or it itself come to harm: real rows, the default model, real signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest


@pytest.fixture(scope="module")
def rows(workload):
    chosen = [*workload("label")[:16], *workload("write")[:16]]
    for number, row in enumerate(chosen):
        row["body"] |= {"max_tokens": 12 + number, "temperature": number % 2}
    return chosen


@pytest.fixture(scope="module")
def undisturbed(rows, make_runs):
    return make_runs().fresh(rows)


@pytest.fixture
def runs(rows, make_runs):
    made = make_runs()
    made.write(rows)
    return made


def wait_for_rows(runs, process, count: int) -> None:
    deadline = time.monotonic() + 120
    while runs.num_rows() < count:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


def workers(runs) -> list[int]:
    found = []
    for pid in runs.processes():
        try:
            if any(word.endswith(".worker") for word in psutil.Process(pid).cmdline()):
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def test_everything_stopped_for_a_while_kills_nobody(runs, undisturbed):
    """Longer than a worker may stand still; all stop at once and go on one after another."""
    process = runs.start("--stuck-after", "1")
    wait_for_rows(runs, process, 3)
    stopped = runs.processes()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    for pid in sorted(stopped):
        os.kill(pid, signal.SIGCONT)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0 and "died" not in said, said
    assert runs.results() == undisturbed


def test_the_coordinator_dies_while_a_worker_is_stopped(runs, undisturbed):
    """A stopped process hears of nothing, and still must not stay."""
    process = runs.start()
    wait_for_rows(runs, process, 2)
    for pid in workers(runs):
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.communicate()
    assert runs.processes_after_a_second() == []
    runs.run()
    assert runs.results() == undisturbed
    assert list(runs.temporary.iterdir()) == []


def test_a_pack_cut_off_ends_the_run_and_the_next_goes_on(make_runs, rows, undisturbed, smollm2_pack, tmp_path):
    model = shutil.copy(smollm2_pack, tmp_path / smollm2_pack.name)
    size = os.path.getsize(model)
    runs = make_runs(model=model)
    runs.write(rows)
    process = runs.start("--workers", "1")
    wait_for_rows(runs, process, 2)
    os.truncate(model, size // 2)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 1, said
    assert f"the packed model was cut to {size // 2} of {size} bytes during the run" in said
    assert said.count("died: killed by SIGBUS") == 1
    assert not runs.errors.exists()
    shutil.copy(smollm2_pack, model)
    runs.run("--workers", "1")
    assert runs.results() == undisturbed


def test_a_changed_source_is_reported_at_the_end(make_runs, rows, smollm2_gguf, tmp_path):
    source = shutil.copy(smollm2_gguf, tmp_path / smollm2_gguf.name)
    runs = make_runs(model=source)
    runs.write(rows[:8])
    process = runs.start()
    wait_for_rows(runs, process, 1)
    os.utime(source)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0
    assert f"the model was not left alone during the run: {source}" in said


@pytest.mark.parametrize("what", ["SIGSEGV", "HANG"])
def test_a_poison_row_is_set_aside_alone_and_can_be_run_again(runs, rows, undisturbed, what):
    victim = rows[21]
    victim_text = victim["body"]["messages"][-1]["content"]
    runs.write(rows)
    hook = {"COREMILL_TEST_POISON": f"{what}:{victim_text[:40]}"}
    assert sum(victim_text[:40] in json.dumps(row) for row in rows) == 1
    runs.run("--stuck-after", "1", status=3, **hook)
    assert runs.results() == {name: made for name, made in undisturbed.items() if name != victim["custom_id"]}
    (line,) = [json.loads(line) for line in runs.errors.read_text().splitlines()]
    assert (line["custom_id"], line["error"]["code"]) == (victim["custom_id"], "worker_crashed")
    cause = "killed by SIGSEGV" if what == "SIGSEGV" else "stuck: no operation completed for 1 s"
    message, command = line["error"]["message"].split("; this runs it alone: ")
    assert cause in message
    again = subprocess.run(
        command + " --stuck-after 1",
        shell=True,
        cwd=runs.folder,
        env=runs.environ | hook | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert again.returncode == 3 and cause in again.stderr, again.stderr
    # Without the hook nothing is wrong with the row.
    runs.run("--retry-errors")
    assert runs.results() == undisturbed
