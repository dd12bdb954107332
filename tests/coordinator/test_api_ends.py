"""Ends of a coordinator, wanted and not: close, Ctrl-C, the last reference, forks, kills. Nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait

import psutil
import pytest

from coremill.config.errors import EngineClosedError, EngineError
from coremill.coordinator import Coordinator
from coremill.coordinator import engine as engine_module


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


def test_closed_means_closed(tiny_pack):
    coordinator = Coordinator(tiny_pack, workers=1)
    jobs = [coordinator.submit("a", max_tokens=400, seed=n) for n in range(100)]
    coordinator.close()
    outcomes = [job.exception(5) for job in jobs]
    assert all(isinstance(error, EngineClosedError) for error in outcomes if error is not None)
    assert any(outcomes)
    with pytest.raises(EngineClosedError, match=r"^the coordinator is closed$"):
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
