"""`coremill bench coordinator`: stubs that speak the real protocol, and what is made of their counts."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from coremill.config.errors import EngineError
from coremill.config.messages import Released
from coremill.config.settings import from_command_line
from coremill.tools.bench import coordinator
from coremill.tools.bench.coordinator import coordinator_text, load


def settings(tmp_path, **given):
    return from_command_line("bench coordinator", given, {"HOME": str(tmp_path)})


def _children() -> set[int]:
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_every_token_of_every_row_is_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(coordinator, "_COUNTS", (2, 8, 64))
    counted, handed_back = [], []
    figures, answer_all = coordinator._figures, coordinator._answer_all

    def keep_counts(count, num_rows, counts, *rest):
        counted.append(counts)
        return figures(count, num_rows, counts, *rest)

    def keep_released(engine, num_rows):
        scheduler = engine._shell.scheduler
        advance, index = scheduler.advance, len(handed_back)
        handed_back.append(0)

        def count(events, now):
            handed_back[index] += sum(isinstance(getattr(event, "message", None), Released) for event in events)
            return advance(events, now)

        scheduler.advance = count
        return answer_all(engine, num_rows)

    monkeypatch.setattr(coordinator, "_figures", keep_counts)
    monkeypatch.setattr(coordinator, "_answer_all", keep_released)
    before, lines = _children(), []
    report = coordinator.bench_coordinator(
        settings(tmp_path, workers="5", max_active="3", step_seconds="0"), lines.append
    )
    assert [row["workers"] for row in report["coordinator"]] == [2, 5] and len(lines) == 2
    for row, counts, num_released in zip(report["coordinator"], counted, handed_back, strict=True):
        num_rows = row["workers"] * 3 * coordinator._ROWS_PER_PLACE
        assert row["rows"] == num_rows
        assert row["tokens"] == sum(32 + number * 37 % 65 for number in range(num_rows))
        # Every step chooses a token at least, as a prompt fits into one, and a token for each of three at most.
        assert row["tokens"] / 3 <= counts["steps"] <= row["tokens"]
        # Hello and Ready of each worker, a message for each step, and one for each sequence that was handed back.
        assert row["messages"] == 2 * row["workers"] + counts["steps"] + num_released
        assert 0 < row["scheduling_us_per_message"] < row["cpu_us_per_message"]
    assert _children() == before
    text = coordinator_text(report)
    assert "Coordinator, 3 sequences a worker" in text and "5 workers" in text


def test_load_of_the_coordinator():
    assert load({"workers": 192, "cpu_us_per_message": 50.0}, 0.01) == pytest.approx(0.96)


def test_a_hub_that_does_not_start(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match="a hub of stubs ended with code 1"), coordinator._hubs(tmp_path, 1, 0.0):
        pass
    assert list(tmp_path.glob("hub*")) == []


@pytest.fixture
def short_folder():
    """Sockets lie in it, whose paths must be short."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def test_nothing_stays_when_it_is_killed(short_folder):
    """Stubs, hubs and placeholders end with the bench."""
    mark = f"{short_folder}/"
    environment = {**os.environ, "TMPDIR": short_folder}
    num_hubs = min(3, max(1, len(os.sched_getaffinity(0)) - 1))
    command = [sys.executable, "-m", "coremill.tools", "bench", "coordinator", "--workers", "3", "--step-seconds", "30"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as bench:
        _wait(lambda: len(_processes_with(mark)) == 3 + num_hubs or bench.poll() is not None)
        assert bench.poll() is None
        bench.send_signal(signal.SIGKILL)
    _wait(lambda: not _processes_with(mark))


def _processes_with(mark: str) -> list[int]:
    """Of hubs (the FIFO is an argument) and placeholders (their standard output is one)."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdecimal() else ""
            if "coremill.tools.bench.stubs" in words and mark in words:
                found.append(int(entry.name))
            elif words.startswith(("cat", "/bin/cat")) and os.readlink(entry / "fd/1").startswith(mark):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _wait(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
