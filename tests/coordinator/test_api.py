"""The coordinator as people use it, on a tiny random model unless a test says otherwise."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future, as_completed, wait
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import psutil
import pytest

import coremill
from coremill.config.errors import ConfigError, EngineClosedError, EngineError, ModelError, RequestError
from coremill.coordinator import Completion, Coordinator
from coremill.coordinator import engine as engine_module

MESSAGES = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def shared(tiny_pack):
    with Coordinator(tiny_pack, ctx=400) as coordinator:
        yield coordinator


def lives(pid: int) -> bool:
    """A zombie does not: it waits for whatever is process 1 here."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids, within: float) -> bool:
    deadline = time.monotonic() + within
    while any(lives(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_the_package_hands_it_out():
    assert coremill.Coordinator is Coordinator


def test_a_prompt(shared):
    job = shared.submit("ab cd", max_tokens=5, temperature=0, custom_id="mine")
    assert isinstance(job, Future)
    result = job.result(60)
    assert isinstance(result, Completion)
    assert (result.custom_id, job.custom_id) == ("mine", "mine")
    assert result.usage.completion_tokens == len(result.token_ids) <= 5
    assert result.usage.total_tokens == result.usage.prompt_tokens + len(result.token_ids)
    assert result.finish_reason == ("length" if len(result.token_ids) == 5 else "stop")
    timing = result.timing
    assert timing.worker in (0, 1) and min(timing.queued_seconds, timing.prefill_seconds, timing.decode_seconds) >= 0


def test_a_chat_is_its_template_and_token_ids_are_taken_as_they_are(shared):
    chat = shared.submit(messages=MESSAGES, max_tokens=8, seed=4).result(60)
    text = shared.submit("hello there", max_tokens=8, seed=4).result(60)  # this model's template adds nothing
    assert chat.token_ids == text.token_ids
    ids = [5, 6, 7]
    assert shared.submit(prompt_ids=ids, max_tokens=3).result(60).usage.prompt_tokens == 3


def test_seeds(shared):
    def tokens(**more):
        return shared.submit("a", max_tokens=20, **more).result(60).token_ids

    assert tokens(seed=1) == tokens(seed=1) != tokens(seed=2)
    assert tokens(custom_id="x") == tokens(custom_id="x") != tokens(custom_id="y")
    assert tokens(seed=-1) == tokens(seed=-1)


def test_stop_strings_end_the_text(shared):
    whole = shared.submit(prompt_ids=[9], max_tokens=60, seed=3).result(60)
    stop = next(pair for pair in map("".join, pairwise(whole.text)) if pair.isascii() and pair.isalnum())
    result = shared.submit(prompt_ids=[9], max_tokens=60, seed=3, stop=[stop]).result(60)
    assert result.text == whole.text[: whole.text.index(stop)]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({}, "invalid_value"),
        ({"prompt": "a", "messages": MESSAGES}, "invalid_value"),
        ({"prompt": 5}, "invalid_value"),
        ({"prompt": "a", "temperature": 3}, "invalid_value"),
        ({"prompt": "a", "max_tokens": 0}, "invalid_value"),
        ({"messages": [{"role": "king", "content": ""}]}, "invalid_value"),
        ({"prompt": "a", "stop": [""]}, "invalid_value"),
    ],
)
def test_wrong_fields_are_refused_at_once(shared, given, code):
    with pytest.raises(RequestError) as caught:
        shared.submit(**given)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("priority", [1.5, True, "high", [1], 10**30, float("nan")]),
        ("custom_id", [5, b"x", "", "\ud800", "y" * 5000]),
        ("allow_special", ["false", "no", 1, object()]),
        ("stop", [5, b"a", {"a": 1}, ["a", 5]]),
        ("messages", [5, "abc", MESSAGES[0], [5], []]),
        ("prompt_ids", [5, "12", b"12", [1.5], ["1"], [-1], [[1]], [], np.array([1.0]), np.array([[1]])]),
        ("max_tokens", [np.float32(3), np.bool_(True), "5"]),
        ("temperature", ["1", np.float32("nan"), np.array([1.0])]),
    ],
)
def test_each_wrong_field_is_refused_by_its_name(shared, field, wrong):
    for value in wrong:
        given = (
            {field: value} if field in ("messages", "prompt_ids") else {"prompt": "a", "max_tokens": 1, field: value}
        )
        with pytest.raises(RequestError) as caught:
            shared.submit(**given)
        assert caught.value.code == "invalid_value"
        assert caught.value.param.split(".")[0] == field and f"'{field}" in caught.value.message
    assert shared.submit("a", max_tokens=1).result(60)  # nobody else has noticed


def test_what_programs_have_instead_of_json(shared):
    """Numbers of numpy, anything that can be gone through, any mapping."""
    plain = shared.submit(prompt_ids=[5, 6, 7], max_tokens=4, temperature=0.5, top_k=9, seed=3, stop=["q"]).result(60)
    same = shared.submit(
        prompt_ids=np.array([5, 6, 7]), max_tokens=np.int64(4), temperature=np.float32(0.5), top_k=np.uint8(9),
        seed=np.int64(3), stop=(stop for stop in "q"), priority=np.int32(2),
    ).result(60)  # fmt: skip
    assert same.token_ids == plain.token_ids
    chat = shared.submit(messages=iter([MappingProxyType(MESSAGES[0])]), max_tokens=4, seed=3).result(60)
    assert chat.token_ids == shared.submit(messages=MESSAGES, max_tokens=4, seed=3).result(60).token_ids


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"prompt": "xq" * 400}, "context_length_exceeded"),
        ({"prompt": "a", "max_tokens": 400}, "context_length_exceeded"),
        ({"prompt_ids": [300], "max_tokens": 1}, "invalid_value"),
    ],
)
def test_what_turns_out_wrong_later_is_raised_by_the_result(shared, given, code):
    try:
        job = shared.submit(**given)
    except RequestError as error:
        assert error.code == code
        return
    with pytest.raises(RequestError) as caught:
        job.result(60)
    assert caught.value.code == code


def test_many_threads(shared):
    reference = {n: shared.submit("a b c", max_tokens=20, seed=n).result(60).token_ids for n in range(8)}
    found: dict[tuple[int, int], tuple] = {}

    def ask(thread: int) -> None:
        jobs = {shared.submit("a b c", max_tokens=20, seed=n): n for n in range(8)}
        for job in as_completed(jobs, timeout=60):
            found[thread, jobs[job]] = job.result().token_ids

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 64
    assert all(tokens == reference[n] for (_, n), tokens in found.items())


def test_cancel(shared):
    jobs = [shared.submit("a", max_tokens=350, seed=n) for n in range(200)]
    last = jobs[-1]
    assert last.cancel() and last.cancelled()
    with pytest.raises(CancelledError):
        last.result(1)
    for job in jobs:
        job.cancel()
    done = [job for job in jobs if not job.cancelled()]
    assert all(job.result(0).token_ids for job in done)
    assert len(shared.submit("a", max_tokens=3, seed=1).result(60).token_ids) > 0


def test_stats(shared):
    assert shared.wait_ready(30)
    shared.submit("a", max_tokens=3).result(60)
    workers = shared.stats()["workers"]
    assert sum(worker["decode_tokens"] for worker in workers) > 0
    assert all(worker["pss_bytes"] for worker in workers)


def test_arguments_of_the_whole_are_checked(shared):
    for count in ("a", None, [1], True, 1.0, 0, 10**5000):
        with pytest.raises(ConfigError, match=r"^workers is .*: it must be an integer from 1 to 4096"):
            shared.workers(count)
    for timeout in ("x", 1e300, math.nan, math.inf, True, [1], 10**5000):
        for method in (shared.wait_ready, shared.drain):
            with pytest.raises(ConfigError, match=r"^timeout is .*: it must be a number of seconds up to 1e\+09, or"):
                method(timeout)
    assert shared.wait_ready(60) and shared.drain(60) and shared.wait_ready(-1)


def test_options_and_models_are_checked(tiny_pack, tmp_path):
    with pytest.raises(ConfigError, match="max_active"):
        Coordinator(tiny_pack, max_active=0)
    with pytest.raises(ConfigError):
        Coordinator(tiny_pack, no_such_option=1)
    with pytest.raises(ConfigError, match="ctx is 100000"):
        Coordinator(tiny_pack, ctx=100_000)
    with pytest.raises(ModelError):
        Coordinator(tmp_path / "missing.gguf")
    for model in (None, 5, b"x", [tiny_pack]):
        with pytest.raises(ConfigError, match=r"model is .*: it must be the path of a file"):
            Coordinator(model)
    with pytest.raises(ConfigError, match="on_event is 5"):
        Coordinator(tiny_pack, on_event=5)


def test_closed_means_closed(tiny_pack):
    coordinator = Coordinator(tiny_pack, workers=1)
    jobs = [coordinator.submit("a", max_tokens=400, seed=n) for n in range(100)]
    coordinator.close()
    outcomes = [job.exception(5) for job in jobs]
    assert all(isinstance(error, EngineClosedError) for error in outcomes if error is not None)
    assert any(outcomes)
    with pytest.raises(EngineClosedError, match="^the coordinator is closed$"):
        coordinator.submit("a")
    coordinator.close()


def test_made_in_a_thread_that_ends(tiny_pack):
    made = []
    thread = threading.Thread(target=lambda: made.append(Coordinator(tiny_pack, workers=1)))
    thread.start()
    thread.join()
    with made[0] as coordinator:
        assert coordinator.submit("a", max_tokens=2).result(60)


def test_dropped_without_close(tiny_pack):
    coordinator = Coordinator(tiny_pack, workers=1)
    kept = coordinator.submit("a", max_tokens=300)
    pids = [worker["pid"] for worker in coordinator.stats()["workers"]] + [coordinator._backend.text.pid]
    dropped = threading.Event()
    coordinator.submit("b", max_tokens=2).add_done_callback(lambda job: dropped.set())
    del coordinator
    assert kept.result(30).token_ids and dropped.wait(30)  # jobs are done all the same
    assert all(lives(pid) for pid in pids)
    del kept
    gc.collect()
    assert gone(pids, 30)


@pytest.mark.parametrize("where", ["Storage", "Shell"])
def test_ctrl_c_in_the_constructor(tiny_pack, monkeypatch, where):
    processes, threads = set(psutil.Process().children()), set(threading.enumerate())
    original = getattr(engine_module, where)

    def interrupted(*args, **more):
        made = original(*args, **more)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        return made

    monkeypatch.setattr(engine_module, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        Coordinator(tiny_pack, workers=1)
    assert set(psutil.Process().children()) <= processes
    assert set(threading.enumerate()) <= threads


def test_a_forked_child_gets_errors_not_hangs(tiny_pack):
    with Coordinator(tiny_pack, workers=1) as coordinator:
        job = coordinator.submit("a", max_tokens=2)
        job.result(60)
        pending = coordinator.submit("a", max_tokens=400)
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            said = []
            assert pending.done() and isinstance(pending.exception(), EngineError) and job.result().token_ids
            wait([pending])
            calls = (pending.result, lambda: next(iter(pending)), pending.cancel, job.cancel, coordinator.stats)
            for attempt in (lambda: coordinator.submit("a"), *calls):
                try:
                    attempt()
                except EngineError as error:
                    said.append(str(error))
            coordinator.close()
            os.write(write_end, json.dumps(said).encode())
            os._exit(0)
        os.close(write_end)
        with open(read_end) as answer:
            said = json.load(answer)
        os.waitpid(child, 0)
        assert len(said) == 6 and all("fork" in text for text in said)
        assert pending.result(60)


SCRIPT = """
import json, os, sys, time
from coremill.coordinator import Coordinator

coordinator = Coordinator(sys.argv[1])
coordinator.wait_ready()
jobs = [coordinator.submit("a b c", max_tokens=400, seed=n) for n in range(int(sys.argv[2]))]
pids = [worker["pid"] for worker in coordinator.stats()["workers"]] + [coordinator._backend.text.pid]
print(json.dumps(pids), flush=True)
if sys.argv[3] == "wait":
    time.sleep(60)
"""


def run_script(pack, folder, jobs: int, end: str) -> subprocess.Popen:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    command = [sys.executable, "-c", SCRIPT, str(pack), str(jobs), end]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def test_kill_of_the_coordinator_takes_everything_along(tiny_pack, tmp_path):
    process = run_script(tiny_pack, tmp_path, 400, "wait")
    pids = json.loads(process.stdout.readline())
    assert all(lives(pid) for pid in pids)
    process.kill()
    process.wait()
    assert gone(pids, 1.0)
    assert list(tmp_path.iterdir()) == []
    process.communicate()


def test_what_a_coordinator_killed_at_start_leaves_is_swept_by_the_next(tiny_pack, tmp_path):
    stale = tmp_path / "coremill-0123456789abcdef"
    stale.mkdir(mode=0o700)
    (stale / "s").touch()
    others = tmp_path / "coremill-notours"
    others.mkdir()
    process = run_script(tiny_pack, tmp_path, 1, "end")
    assert process.stdout.readline()
    process.communicate()
    assert list(tmp_path.iterdir()) == [others]


def test_a_program_that_ends_without_close_leaves_nothing(tiny_pack, tmp_path):
    process = run_script(tiny_pack, tmp_path, 300, "end")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert errors == b""
    assert gone(json.loads(output), 0.5)


def test_under_a_limit_on_addresses(tiny_pack):
    """As of `ulimit -v`: the option that does not fit is named, and what is suggested does."""
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from coremill.coordinator import Coordinator\n"
        "def run(arena):\n"
        "    with Coordinator(sys.argv[1], workers=1, arena=arena) as c:\n"
        "        c.submit(prompt_ids=[5], max_tokens=2).result()\n"
        "try:\n"
        "    run('1G')\n"
        "except Exception as error:\n"
        "    text = str(error); print(text)\n"
        "run(text.rpartition('--arena ')[2])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tiny_pack)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "not enough addresses" in done.stdout and "this would fit: --arena" in done.stdout


def test_kill_of_a_worker_of_the_default_model(smollm2_pack):
    prompts = [f"The {n} ships of the fleet sailed north, and" for n in range(12)]  # none ends at once

    def texts(kill: bool) -> list[str]:
        with Coordinator(smollm2_pack, max_active=4) as coordinator:
            coordinator.wait_ready(60)
            jobs = [coordinator.submit(prompt, max_tokens=80, seed=1) for prompt in prompts]
            if kill:
                place = coordinator._backend.engine._shell.places[0]
                while place.counters["decode_tokens"] < 20:
                    assert not all(job.done() for job in jobs)
                    time.sleep(0.002)
                pid = place.pid
                os.kill(pid, signal.SIGKILL)
                assert gone([pid], 1.0)
                assert not all(job.done() for job in jobs)
            found = [job.result(120).text for job in jobs]
            restarts = [worker["restarts"] for worker in coordinator.stats()["workers"]]
            assert restarts[0] == kill and not any(restarts[1:])
        return found

    assert texts(kill=True) == texts(kill=False)


def test_a_fresh_process_gets_a_token(smollm2_pack):
    """Without a __main__ guard, from `python -c`. How long it takes is `coremill bench start`'s business."""
    script = (
        "import sys; from coremill.coordinator import Coordinator\n"
        "c = Coordinator(sys.argv[1]); print(c.submit('The capital of France is', max_tokens=1, temperature=0)"
        ".result().text, flush=True); c.close()"
    )
    done = subprocess.run([sys.executable, "-c", script, str(smollm2_pack)], capture_output=True, timeout=120)
    assert (done.stdout, done.returncode) == (b" Paris\n", 0), done.stderr
