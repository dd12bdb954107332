"""A coordinator in a notebook's kernel, beside multiprocessing, and in processes that it does not belong to."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time

import psutil
import pytest

from coremill.config.errors import EngineError
from coremill.coordinator import Coordinator


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.005)


def ask_a_new_one(pack: str) -> list[int]:
    with Coordinator(pack, workers=1) as coordinator:
        return list(coordinator.submit(prompt_ids=[5, 6], max_tokens=5, seed=1).result(60).token_ids)


def half(number: int) -> int:
    return number // 2


# ---- multiprocessing ----


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_pools_beside_a_coordinator_and_coordinators_in_pools(tiny_pack, method):
    context = multiprocessing.get_context(method)
    with Coordinator(tiny_pack, workers=1) as coordinator:
        mine = list(coordinator.submit(prompt_ids=[5, 6], max_tokens=5, seed=1).result(60).token_ids)
        running = coordinator.submit("a", max_tokens=400)
        with context.Pool(2) as pool:
            assert pool.map(half, range(6)) == [0, 0, 1, 1, 2, 2]
            assert pool.apply(ask_a_new_one, (str(tiny_pack),)) == mine
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
            assert executor.submit(ask_a_new_one, str(tiny_pack)).result(60) == mine
        assert running.result(60).token_ids


def test_neither_coordinators_nor_jobs_can_be_sent_elsewhere(tiny_pack):
    with Coordinator(tiny_pack, workers=1) as coordinator:
        job = coordinator.submit(prompt_ids=[5], max_tokens=2)
        for what in (coordinator, job):
            with pytest.raises(TypeError, match="belongs to the process"):
                pickle.dumps(what)
        completion = job.result(60)
        assert pickle.loads(pickle.dumps(completion)) == completion


def use_it_all(coordinator, jobs, results) -> list[str]:
    """In a forked child: what each use of the parent's things comes to."""
    done, running = jobs
    uses = (
        lambda: coordinator.submit("a"),
        lambda: coordinator.map(["a"]),
        lambda: next(results),
        lambda: next(iter(running)),
        lambda: running.result(60),
        running.cancel,
        coordinator.drain,
        coordinator.cancel_all,
        lambda: coordinator.count_tokens("a"),
        lambda: coordinator.apply_template([{"role": "user", "content": "a"}]),
        coordinator.stats,
        lambda: coordinator.workers(1),
        coordinator.wait_ready,
    )
    said = []
    for use in uses:
        try:
            said.append(f"no error: {use()}")
        except EngineError as error:
            said.append("forked" if "was forked from it" in str(error) else str(error))
    concurrent.futures.wait([running])  # does not hang
    running.add_done_callback(lambda job: said.append("told"))
    assert done.result().token_ids and running.done() and not running.cancelled()
    results.close()
    coordinator.close()
    return said


def test_everything_in_a_forked_child_is_a_clear_error(tiny_pack, tmp_path):
    answer = tmp_path / "answer"
    with Coordinator(tiny_pack, workers=1) as coordinator:
        done = coordinator.submit("a", max_tokens=2)
        done.result(60)
        running = coordinator.submit("a", max_tokens=400)
        results = coordinator.map(iter(lambda: "a", None), max_tokens=400, window=30)

        def child() -> None:
            answer.write_text(json.dumps(use_it_all(coordinator, (done, running), results)))

        # Its interpreter ends as a process's does, with finalisers and exit handlers.
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        assert process.exitcode == 0
        said = json.loads(answer.read_text())
        assert said == ["forked"] * 13 + ["told"]
        assert running.result(60).token_ids and next(results).token_ids  # the parent has not noticed
        results.close()


# ---- notebooks ----

# A kernel runs cells on its main thread, outlives their exceptions, and keeps the last traceback, with all its frames.
KERNEL = """
import io, json, os, sys, traceback
space, pids = {}, None
for line in sys.stdin:
    try:
        exec(compile(json.loads(line), "<cell>", "exec"), space)
        said = "ok"
    except BaseException as error:
        sys.last_traceback, said = error.__traceback__, type(error).__name__
    print(json.dumps([said, repr(space.get("_"))]), flush=True)
"""
SETUP = """
from coremill.coordinator import Coordinator
c = Coordinator({pack!r}, ctx=400, workers=1)
c.wait_ready()
_ = [worker["pid"] for worker in c.stats()["workers"]] + [c._backend.text.pid]
"""
WAITS = {
    "result": "job = c.submit('a', max_tokens=390); print('begun', file=sys.stderr, flush=True); job.result()",
    "text": "job = c.submit('a', max_tokens=390)\\nfor n, piece in enumerate(job):\\n"
    "  if n == 0: print('begun', file=sys.stderr, flush=True)",
    "map": "for n, result in enumerate(c.map(iter(lambda: 'a', None), max_tokens=20)):\\n"
    "  if n == 0: print('begun', file=sys.stderr, flush=True)",
    "drain": "jobs = [c.submit('a', max_tokens=390, seed=n) for n in range(50)]\\n"
    "print('begun', file=sys.stderr, flush=True); c.drain()",
}


@pytest.fixture
def kernel(tiny_pack, tmp_path):
    """A process that runs cells, in a process group of its own as Jupyter starts it. send_cell(code), then answer():
    [what it raised or "ok", repr(_)]."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", KERNEL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment, start_new_session=True,
    )  # fmt: skip

    def send(cell: str) -> None:
        process.stdin.write(json.dumps(cell) + "\n")
        process.stdin.flush()

    def answer() -> list[str]:
        return json.loads(process.stdout.readline())

    process.send_cell, process.answer = send, answer
    send("import sys\n" + SETUP.format(pack=str(tiny_pack)))
    said, pids = answer()
    assert said == "ok"
    process.pids = json.loads(pids)
    yield process
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()


def test_ctrl_c_cancels_what_a_cell_waits_for_and_nothing_else(kernel):
    """Jupyter signals the kernel's whole process group, workers too."""
    for wait in WAITS.values():
        kernel.send_cell(wait.replace("\\n", "\n"))
        assert kernel.stderr.readline() == "begun\n"
        os.killpg(kernel.pid, signal.SIGINT)
        assert kernel.answer()[0] == "KeyboardInterrupt", wait
        kernel.send_cell("assert c.drain(60); _ = c.submit('a', max_tokens=2, seed=1).result(60).usage")
        assert kernel.answer()[0] == "ok", wait
    kernel.send_cell("_ = [worker['restarts'] for worker in c.stats()['workers']]")
    assert kernel.answer() == ["ok", "[0]"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, "shutdown"])
def test_a_restart_of_the_kernel_leaves_nothing(kernel, tmp_path, how):
    kernel.send_cell("jobs = [c.submit('a', max_tokens=390, seed=n) for n in range(100)]")
    assert kernel.answer()[0] == "ok"
    assert all(lives(pid) for pid in kernel.pids)
    if how == "shutdown":
        kernel.stdin.close()  # its loop ends
    else:
        kernel.send_signal(how)
    kernel.wait(60)
    wait_until(lambda: not any(lives(pid) for pid in kernel.pids))
    assert list(tmp_path.iterdir()) == []


def test_the_cell_with_the_coordinator_runs_again(kernel, tiny_pack):
    """The one before is closed as soon as its name stands for another."""
    before = kernel.pids
    kernel.send_cell(SETUP.format(pack=str(tiny_pack)))
    said, pids = kernel.answer()
    assert said == "ok"
    wait_until(lambda: not any(lives(pid) for pid in before))
    assert all(lives(pid) for pid in json.loads(pids))
