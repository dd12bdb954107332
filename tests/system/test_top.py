"""`coremill top` and real runs: what it shows is true, what it asks for happens, the run is none the worse for it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from coremill.config.errors import RequestError
from coremill.coordinator.local_socket import LocalClient

TOP = [sys.executable, "-m", "coremill.tools", "top"]
# Nothing starts before the first line, which tells the format.
FIRST = {"custom_id": "first", "prompt": "One, two,", "max_tokens": 1, "temperature": 0}
# Its greedy continuation goes on until the context is full, which takes minutes.
ENDLESS = {"custom_id": "endless", "prompt": "1 2 3 4 5 6 7 8 9 10 11 12 13", "max_tokens": 4000, "temperature": 0}


def wait_for(condition: Callable[[], object], what: str) -> object:
    """What it returns once that is true. A minute only ends a test that hangs."""
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited a minute for {what}"
        time.sleep(0.02)
    return found


class PipedRun:
    """`coremill run -` with one short row: it goes on until `end`, whatever it has done."""

    def __init__(self, runs, *options: str) -> None:
        self.runs = runs
        command = [sys.executable, "-m", "coremill.tools", "run", "-", "-m", runs._model, "-o", str(runs.out)]
        command += ["--stats", str(runs.stats_path), *options]
        self.process = subprocess.Popen(
            command, env=runs.environ, cwd=runs.folder, stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.feed(FIRST)

    def feed(self, *rows: dict) -> None:
        self.process.stdin.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        self.process.stdin.flush()

    def connect(self) -> LocalClient:
        """To its socket, once it is there."""

        def address() -> str | None:
            assert self.process.poll() is None, self.process.stderr.read().decode()
            for record in self.runs.temporary.glob("*/record"):
                with contextlib.suppress(OSError, ValueError):
                    found = json.loads(record.read_text())
                    if found["pid"] == self.process.pid:
                        return found["address"]
            return None

        return LocalClient(wait_for(address, "the socket"))

    def end(self, status: int = 0) -> str:
        said = self.process.communicate(timeout=300)[1].decode()
        assert self.process.returncode == status, said
        return said


@pytest.fixture
def piped(make_runs) -> Iterator[Callable[..., PipedRun]]:
    """piped(*options) -> a run that waits for rows, in a folder of its own."""
    made: list[PipedRun] = []

    def start(*options: str, runs=None) -> PipedRun:
        made.append(PipedRun(runs or make_runs(), *options))
        return made[-1]

    yield start
    for run in made:
        run.process.kill()
        run.process.communicate()


@pytest.fixture(scope="module")
def rows(workload) -> list[dict]:
    chats, labels = workload("write")[:6], workload("label")[:18]
    for number, row in enumerate(chats):
        row["body"] |= {"max_tokens": 16 + number, "temperature": number % 3 / 2}
    return [*chats, *labels]


@pytest.fixture(scope="module")
def undisturbed(rows, make_runs) -> dict[str, bytes]:
    return make_runs().fresh([FIRST, *rows])


def glance(client: LocalClient, rows: int = 0) -> dict:
    return client.call("glance", {"rows": rows}, timeout=60)


def active(client: LocalClient) -> int:
    return sum(worker["active"] for worker in glance(client)["workers"])


def top(run: PipedRun, *options: str, **more) -> subprocess.CompletedProcess[str]:
    command = [*TOP, *options]
    return subprocess.run(command, env=run.runs.environ, capture_output=True, text=True, timeout=120, **more)


# ---- what is shown ----


def test_what_is_shown_at_the_end_is_what_the_summary_says(piped, rows):
    run, num_rows = piped(), len(rows) + 1
    with run.connect() as client:
        watching = subprocess.Popen(
            [*TOP, str(run.process.pid), "--json", "--interval", "0.2"],
            env=run.runs.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        run.feed(*rows)
        wait_for(lambda: glance(client)["rows"]["results"] == num_rows, "all rows")
        seen = json.loads(top(run, str(run.process.pid), "--json", "--once", check=True).stdout)
        page = top(run, str(run.process.pid)).stdout  # no terminal: once
    said = run.end()
    views = [json.loads(line) for line in watching.communicate(timeout=120)[0].splitlines()]
    assert watching.returncode == 0 and views, "it ends with the run"
    stats = run.runs.stats()
    assert seen["queue"]["done"] == stats["rows"] == num_rows and seen["queue"]["errors"] == stats["errors"] == 0
    assert seen["tokens"] == {
        "prompt": stats["prompt_tokens"], "cached": stats["cached_tokens"], "completion": stats["completion_tokens"],
    }  # fmt: skip
    for shown, told in zip(seen["workers"], stats["workers"], strict=True):
        for name in ("pid", "cores", "restarts", "prefill_tokens", "decode_tokens"):
            assert shown[name] == told[name], name
        assert shown["state"] == "idle" and shown["active"] == 0 and shown["rows"] == []
        assert shown["pss_bytes"] == pytest.approx(told["pss_bytes"], rel=0.3)
        parts = [shown[f"pss_{part}_bytes"] for part in ("weights", "arena", "private")]
        assert sum(parts) == shown["pss_bytes"] and all(part > 0 for part in parts)
        assert 0 <= shown["steal"] <= 1 and (shown["mhz"] is None or shown["mhz"] > 100)
    assert sum(worker["cached_tokens"] for worker in seen["workers"]) == stats["cached_tokens"]
    assert sum(worker["prompt_tokens"] for worker in seen["workers"]) == stats["prompt_tokens"]
    for before, after in pairwise(views):
        assert before["totals"]["decode_tokens"] <= after["totals"]["decode_tokens"] <= stats["completion_tokens"]
        assert before["time"] < after["time"]
    assert f"{num_rows} rows done" in page and "new/s" in page and "\x1b" not in page
    assert f"{num_rows} results" in said


def test_a_picture_of_a_run(piped, tmp_path):
    run = piped()
    run.connect().close()
    path = tmp_path / "top.svg"
    for _ in range(2):  # a picture may be replaced
        assert str(path) in top(run, "--svg", str(path), check=True).stdout
    assert path.read_text().startswith("<svg ")
    path.write_text("my notes")
    done = top(run, "--svg", str(path))
    assert done.returncode == 2 and "--svg" in done.stderr and path.read_text() == "my notes"


def test_a_resident_coordinator_is_shown_too(make_runs):
    runs = make_runs()
    command = [sys.executable, "-m", "coremill.tools", "up", "-m", runs._model]
    up = subprocess.Popen(command, env=runs.environ, cwd=runs.folder, stdout=subprocess.PIPE, text=True)
    try:
        assert up.stdout.readline().startswith("ready ipc://")
        shown = [*TOP, str(up.pid), "--once"]
        page = subprocess.run(shown, env=runs.environ, capture_output=True, text=True, timeout=120, check=True).stdout
        assert page.startswith("coremill up   ") and f"pid {up.pid}" in page and "idle" in page
    finally:
        up.terminate()
        up.communicate(timeout=60)


def test_which_run_is_meant(piped, make_runs):
    runs = make_runs()
    one = piped(runs=runs)
    done = top(one, "999999999", "--once")
    assert done.returncode == 1 and "no run or up of yours has process id 999999999" in done.stderr
    one.connect().close()
    other = piped("-o", str(runs.folder / "other.jsonl"), runs=runs)
    other.connect().close()
    done = top(one, "--once")
    assert done.returncode == 2 and "coremill top PID" in done.stderr
    assert all(str(run.process.pid) in done.stderr for run in (one, other))
    assert f"pid {other.process.pid}" in top(one, str(other.process.pid), "--once", check=True).stdout
    done = top(one, "ipc:///nowhere/s", "--once")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert top(one, "nonsense").returncode == 2


def test_nothing_is_running(make_runs):
    runs = make_runs()
    found = subprocess.run([*TOP], env=runs.environ | {"PYTHONPATH": ""}, capture_output=True, text=True, timeout=120)
    others = Path(f"/run/user/{os.getuid()}").is_dir()  # where somebody's real run may be
    assert found.returncode == 1 or others
    if found.returncode == 1:
        assert found.stderr == "coremill: no run or up of yours is running\n"


# ---- what is asked for ----


def test_pause_cancel_and_workers_leave_the_other_rows_as_they_are(piped, rows, undisturbed):
    run = piped("--workers", "2")
    with run.connect() as client:
        client.call("pause", {"paused": True})
        run.feed(ENDLESS, *rows, {**ENDLESS, "custom_id": "waiting"})
        wait_for(lambda: glance(client)["queue"]["waiting"] >= len(rows) + 2, "all rows to wait")
        client.call("cancel", {"id": "waiting"})
        with pytest.raises(RequestError, match="no row 'nobody' is waiting or running"):
            client.call("cancel", {"id": "nobody"})
        client.call("pause", {"paused": False})
        running = lambda: [row[0] for worker in glance(client, 100)["workers"] for row in worker["rows"]]  # noqa: E731
        wait_for(lambda: "endless" in running() and glance(client)["rows"]["results"] > 1, "rows to run")
        client.call("pause", {"paused": True})
        wait_for(lambda: active(client) == 0, "all rows to rest")
        before = glance(client)
        client.call("workers", {"count": 1})
        wait_for(lambda: glance(client)["workers"][1]["state"] == "stopped", "a worker to leave")
        assert glance(client)["workers"][0]["steps"] == before["workers"][0]["steps"]
        client.call("pause", {"paused": False})
        wait_for(lambda: "endless" in running(), "the row to go on")
        client.call("workers", {"count": 2})
        wait_for(lambda: glance(client)["rows"]["results"] == len(rows) + 1, "all other rows")
        client.call("cancel", {"id": "endless"})
        wait_for(lambda: glance(client)["rows"]["errors"] == 2, "both cancelled rows")
        for kind, fields in (("workers", {"count": 3}), ("workers", {}), ("pause", {}), ("cancel", {"id": 7})):
            with pytest.raises(RequestError):
                client.call(kind, fields)
    said = run.end(status=3)
    assert run.runs.results() == undisturbed
    failed = [json.loads(line) for line in run.runs.errors.read_text().splitlines()]
    assert [(line["custom_id"], line["error"]["code"]) for line in failed] == [
        ("waiting", "cancelled"), ("endless", "cancelled"),
    ]  # fmt: skip
    assert "2 cancelled" in said and run.runs.stats()["sequences"]["recomputed_tokens"] == 0


def test_a_cancelled_row_is_retried_like_any_that_failed(piped, rows, undisturbed):
    run = piped()
    victim = rows[3]["custom_id"]
    with run.connect() as client:
        client.call("pause", {"paused": True})
        run.feed(*rows)
        wait_for(lambda: glance(client)["queue"]["waiting"] >= len(rows), "all rows to wait")
        client.call("cancel", {"id": victim})
        client.call("pause", {"paused": False})
    run.end(status=3)
    assert run.runs.results().keys() == undisturbed.keys() - {victim}
    again = piped("--retry-errors", runs=run.runs)
    again.feed(*rows)
    again.end()
    assert run.runs.results() == undisturbed


def test_several_watch_one_hangs_one_dies(piped, rows, undisturbed):
    run = piped()
    with run.connect() as client:
        options = {"env": run.runs.environ, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = [*TOP, str(run.process.pid), "--json", "--interval", "0.1"]
        watchers = [subprocess.Popen(command, **options) for _ in range(4)]
        try:
            run.feed(*rows[:8])
            wait_for(lambda: glance(client)["rows"]["results"] > 1, "a first row")
            watchers[0].send_signal(signal.SIGSTOP)
            watchers[1].kill()
            run.feed(*rows[8:])
            wait_for(lambda: glance(client)["rows"]["results"] == len(rows) + 1, "all rows")
            run.end()
            assert [watcher.wait(60) for watcher in watchers[2:]] == [0, 0]
        finally:
            for watcher in watchers:
                watcher.kill()
                watcher.wait()
    assert run.runs.results() == undisturbed


# ---- keys ----


class Terminal:
    """A command at a pseudo terminal."""

    def __init__(self, command: list[str], environ: dict[str, str], columns: int = 80, rows: int = 24) -> None:
        self.fd, self.inner = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(self.inner)
        self.text = ""
        unwanted = ("COLUMNS", "LINES", "NO_COLOR")
        environ = {name: value for name, value in environ.items() if name not in unwanted} | {"TERM": "xterm-256color"}
        ends = {"stdin": self.inner, "stdout": self.inner, "stderr": self.inner}
        self.process = subprocess.Popen(command, env=environ, start_new_session=True, **ends)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        while select.select([self.fd], [], [], 0.02)[0]:
            self.text += os.read(self.fd, 65536).decode(errors="replace")

    def press(self, keys: str, shows: str) -> None:
        """Type, then wait for a text that comes after that."""
        self._read()
        self.text = ""
        os.write(self.fd, keys.encode())
        self.wait(shows)

    def wait(self, shows: str) -> None:
        def there() -> bool:
            self._read()
            return shows in self.text

        wait_for(there, f"{shows!r}, after {self.text[-2000:]!r}")

    def ended(self) -> int:
        def status() -> bool:
            self._read()
            return self.process.poll() is not None

        wait_for(status, "its end")
        self._read()
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.fd)
        os.close(self.inner)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def start(*args, **more) -> Terminal:
        made.append(Terminal(*args, **more))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_keys(piped, terminal):
    run = piped("--workers", "2")
    with run.connect() as client:
        run.feed(ENDLESS, {**ENDLESS, "custom_id": "other \x1b[2J"})
        screen = terminal([*TOP, str(run.process.pid), "--interval", "0.2"], run.runs.environ)
        screen.wait("endless")
        assert "quit" in screen.text and "\x1b[2J" not in screen.text.replace("\x1b[2J\x1b[H", "")
        screen.press("p", "PAUSED")  # until what both rows are needed for is done: none may end before that
        wait_for(lambda: glance(client)["paused"] and active(client) == 0, "a pause")
        screen.press("-", "stopped")
        screen.press("w5\r", "'count' is 5: it must be an integer from 1 to 2")
        screen.press("w2\r", "2 workers")
        wait_for(lambda: glance(client)["workers"][1]["state"] == "ready", "two workers")
        screen.press("ssss", "sorted by state")
        screen.press("r", "↓")
        screen.press("cendless\r", "cancel row 'endless'?")
        screen.press("n", "nothing was cancelled")
        screen.press("c\x1b", "scroll")  # left alone
        assert glance(client)["rows"]["errors"] == 0
        screen.press("cnobody\ry", "no row 'nobody' is waiting or running now")
        screen.press("cendlesss\x7f\ry", "cancelled endless")
        wait_for(lambda: glance(client)["rows"]["errors"] == 1, "the cancelled row")
        screen.press("p", "running")
        wait_for(lambda: not glance(client)["paused"], "the end of the pause")
        screen.resize(160, 40)
        screen.press("", "weights")
        os.write(screen.fd, b"\x1b[A\x1b[B\x1b[5~\x1b[H\x1b[99~\xff?q")
        assert screen.ended() == 0
        assert termios.tcgetattr(screen.inner) == screen.before and "\x1b[?1049l" in screen.text
        client.call("cancel", {"id": "other \x1b[2J"})
    run.end(status=3)


def test_a_terminal_is_left_as_it_was_whatever_ends_it(piped, terminal):
    run = piped()
    command = [*TOP, str(run.process.pid), "--interval", "0.2"]
    run.connect().close()
    for ending in (signal.SIGINT, signal.SIGTERM):
        screen = terminal(command, run.runs.environ)
        screen.wait("quit")
        screen.process.send_signal(ending)
        assert screen.ended() == 128 + ending
        assert termios.tcgetattr(screen.inner) == screen.before and "\x1b[?1049l" in screen.text
    screen = terminal(command, run.runs.environ)
    screen.wait("quit")
    screen.process.send_signal(signal.SIGTSTP)
    wait_for(lambda: os.waitid(os.P_PID, screen.process.pid, os.WSTOPPED | os.WNOHANG), "it to stop")
    assert termios.tcgetattr(screen.inner) == screen.before
    screen.text = ""
    screen.process.send_signal(signal.SIGCONT)
    screen.wait("quit")
    run.end()
    assert screen.ended() == 0 and "it has ended" in screen.text


def test_a_hanging_run_is_said_to_hang_and_q_works(piped, terminal):
    run = piped()
    run.connect().close()
    screen = terminal([*TOP, str(run.process.pid), "--interval", "0.2"], run.runs.environ)
    screen.wait("idle")
    run.process.send_signal(signal.SIGSTOP)
    try:
        screen.wait("no answer for")
        os.write(screen.fd, b"q")
        assert screen.ended() == 0
    finally:
        run.process.send_signal(signal.SIGCONT)
    run.end()


def test_a_run_shows_its_workers_at_a_terminal(make_runs, rows, terminal, undisturbed):
    runs = make_runs()
    runs.write([FIRST, *rows])
    command = [sys.executable, "-m", "coremill.tools", "run", str(runs.input), "-m", runs._model, "-o", str(runs.out)]
    screen = terminal(command, runs.environ)
    assert screen.ended() == 0
    assert runs.results() == undisturbed
    for part in ("rows (", "new/s", "running", "25 results"):
        assert part in screen.text, part


# ---- the log ----


def events(said: str) -> list[dict]:
    return [json.loads(line) for line in said.splitlines()]


def test_the_log_of_a_run_adds_up(make_runs, rows, undisturbed):
    runs = make_runs()
    runs.write([FIRST, *rows, {"custom_id": "bad", "prompt": 3}])
    log = events(runs.run("--log-format", "json", status=3))
    assert runs.results() == undisturbed
    stats = runs.stats()
    assert all(entry["time"] > 1e9 and entry["event"] for entry in log)
    (summary,) = [entry for entry in log if entry["event"] == "summary"]
    assert summary is log[-1] and summary["stats"] == stats and summary["exit_code"] == 3
    assert stats["rows"] == len(rows) + 2 and stats["errors"] == 1
    assert sum(worker["decode_tokens"] for worker in stats["workers"]) == stats["completion_tokens"]
    started = {entry["worker"]: entry["pid"] for entry in log if entry["event"] == "worker_started"}
    assert started == {worker["worker"]: worker["pid"] for worker in stats["workers"]}
    (plan,) = [entry for entry in log if entry["event"] == "plan"]
    assert plan["plan"]["prompt_tokens"] <= stats["prompt_tokens"]
    done = [entry["queue"]["done"] + entry["queue"]["errors"] for entry in log if entry["event"] == "progress"]
    assert done == sorted(done) and all(count <= stats["rows"] for count in done)


def test_the_log_says_how_else_a_run_ended(make_runs, piped, rows):
    runs = make_runs()
    runs.write(rows)
    runs._model = str(runs.folder / "absent.gguf")
    warning, error = events(runs.run("--log-format", "json", status=1, COREMILL_WROKERS="2"))
    assert warning["event"] == "message" and "COREMILL_WROKERS" in warning["text"]
    assert error["event"] == "error" and error["exit_code"] == 1 and "absent.gguf" in error["text"]
    run = piped("--log-format", "json")
    with run.connect() as client:
        run.feed(ENDLESS)
        wait_for(lambda: active(client) == glance(client)["rows"]["results"] == 1, "the row to run")
        run.process.send_signal(signal.SIGINT)
        log = events(run.end(status=130))
    assert log[-1]["event"] == "summary" and log[-1]["exit_code"] == 130 and log[-1]["stats"]["new_results"] == 1
