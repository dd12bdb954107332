"""`coremill up` as a command, with the real model file of a tiny random model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from coremill.coordinator import Coordinator


@pytest.fixture
def up(tiny_gguf, tmp_path, monkeypatch):
    """start(*options) -> (process, its ready lines); killed after the test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COREMILL_CACHE", str(tiny_gguf.parent / "cache"))
    made = []

    def start(*options: object, ready: int = 1):
        command = [sys.executable, "-m", "coremill", "up", "-m", str(tiny_gguf), "--ctx", "400", *map(str, options)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        made.append(process)
        return process, [process.stdout.readline().removeprefix("ready ").strip() for _ in range(ready)]

    yield start
    for process in made:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory, repo_root):
    import importlib.util

    import numpy as np

    path = repo_root / "tests" / "native" / "gguf_writer.py"
    spec = importlib.util.spec_from_file_location("gguf_writer", path)
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    gguf = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    gguf.write_bytes(writer.tiny_llama(np.random.default_rng(1)).build())
    return gguf


def refused(*options: object) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "coremill", "up", *map(str, options)], capture_output=True, text=True)
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_jobs_stay_in_the_queue_from_one_to_the_next(up, tmp_path):
    queue = tmp_path / "jobs.sqlite"
    process, (address,) = up("--queue", queue)
    with Coordinator.attach(address) as c:
        text = c.submit("ab", max_tokens=5, id="a").result(60).text
        c.submit_all([{"id": f"id-{n}", "prompt": "x", "max_tokens": 390} for n in range(1000)])
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143 and f"stay in {queue}" in errors
    refusing, (line,) = up("--queue", queue, "--kv", "q8")
    _, errors = refusing.communicate(timeout=60)
    assert line == "" and refusing.returncode == 4
    assert "unfinished jobs that were accepted with other settings" in errors and errors.count("\n") == 1
    process, (address,) = up("--queue", queue)
    with Coordinator.attach(address) as c:
        assert c.job("a").result(60).text == text
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_a_queue_in_use_is_refused_by_the_process(up, tmp_path):
    first, _ = up("--queue", tmp_path / "jobs.sqlite")
    second, (line,) = up("--queue", tmp_path / "jobs.sqlite")
    _, errors = second.communicate(timeout=60)
    assert line == "" and second.returncode == 1
    assert f"is in use by process {first.pid}: a queue has one coordinator" in errors and errors.count("\n") == 1


def test_keys_and_the_network(up, tmp_path):
    keys = tmp_path / "keys"
    made = subprocess.run(
        [sys.executable, "-m", "coremill", "up", "--make-keys", "--keys", str(keys)], capture_output=True, text=True
    )
    assert made.returncode == 0 and len(made.stdout.splitlines()) == 4
    assert refused("--make-keys", "--keys", keys)[0] == 2
    _, (address, network) = up("--listen", "tcp://127.0.0.1:0", "--keys", keys, ready=2)
    assert address.startswith("ipc://") and network.startswith("tcp://127.0.0.1:")
    with Coordinator.attach(network, keys=keys) as c:
        assert c.submit("ab", max_tokens=2).result(60).token_ids


def test_what_happens_as_lines_of_json(up):
    process, (address,) = up("--log-format", "json")
    with Coordinator.attach(address) as c:
        (worker, *_) = c.stats()["workers"]
        os.kill(worker["pid"], signal.SIGKILL)
        assert c.submit("ab", max_tokens=5).result(60).token_ids
        c.submit("ab", max_tokens=5, id="a").result(60)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    events = [json.loads(line) for line in errors.splitlines()]
    assert {"stage", "worker_ready", "worker_died", "end"} <= {event["event"] for event in events}
    (died,) = (event for event in events if event["event"] == "worker_died")
    assert (died["worker"], died["pid"]) == (worker["worker"], worker["pid"])
    (end,) = (event for event in events if event["event"] == "end")
    assert end.items() >= {"queue": None, "unfinished": 0, "unread": 1}.items()


def test_top_sees_it(up):
    process, _ = up()
    command = [sys.executable, "-m", "coremill", "top", str(process.pid), "--once"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "up" in done.stdout and "tiny" in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "missing option -m/--model"),
        (("-m", "x", "--listen", "tcp://*:5"), "--listen needs --keys"),
        (("-m", "x", "--keys", "k"), "--keys is for --listen"),
        (("-m", "x", "--listen", "ipc://x", "--keys", "k"), "must be tcp://HOST:PORT"),
        (("-m", "x", "--listen", "tcp://*:5", "--keys", "/nowhere"), "--make-keys"),
        (("--make-keys",), "--make-keys needs --keys"),
        (("-m", "x", "--keep", "0"), "--keep is '0'"),
    ],
)
def test_wrong_options(options, said):
    code, errors = refused(*options)
    assert code == 2 and said in errors and errors.count("\n") == 1


def test_a_queue_that_cannot_be(up, tmp_path):
    (tmp_path / "text").write_text("hello")
    for path in (tmp_path / "text", tmp_path / "missing" / "jobs", tmp_path):
        process, _ = up("--queue", path)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1 and str(path) in errors and errors.count("\n") == 1
    assert os.path.exists(tmp_path / "text")
