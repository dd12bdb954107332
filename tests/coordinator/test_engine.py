"""The engine with real worker processes (and a make-believe model, unless a test says otherwise)."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import Future, wait

import psutil
import pytest

from coremill.config.errors import ConfigError, EngineClosedError, EngineError, UnsupportedHostError, WorkerStartError
from coremill.config.request import SequenceRequest
from coremill.coordinator.engine import NOT_THE_REQUESTS_FAULT


def submit(engine, request: SequenceRequest) -> Future:
    future: Future = Future()
    future.ticket = engine.submit(request, future.set_result)
    return future


def rows(sim, count: int, seed: int = 0) -> list[SequenceRequest]:
    rng = random.Random(seed)
    return [sim.random_request(rng, f"row {index}") for index in range(count)]


def outcome(result):
    return result.token_ids, result.text, result.finish_reason


def pids(engine) -> list[int]:
    return [place.pid for place in engine._shell.places]


def gone(pid: int, within: float = 1.0) -> bool:
    deadline = time.monotonic() + within
    while psutil.pid_exists(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def wait_for(condition, seconds: float = 60.0) -> None:
    """The seconds only end a test that hangs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def running(engine) -> int:
    return engine._shell.scheduler.count_blocks()["private"]


@pytest.mark.parametrize(("num_workers", "max_active", "step_tokens"), [(1, 16, 128), (2, 5, 7), (2, 1, 64)])
def test_rows_come_back_right(engine, sim, num_workers, max_active, step_tokens):
    run = engine(num_workers, max_active=max_active, step_tokens=step_tokens)
    requests = rows(sim, 60)
    for request, future in [(request, submit(run, request)) for request in requests]:
        assert outcome(future.result(60)) == sim.expected(request)
    run._shell.scheduler.check()


def test_real_model_same_tokens_for_any_workers_and_batches(engine):
    def tokens(**settings):
        run = engine(fake=False, **settings)
        rng = random.Random(3)
        requests = [
            SequenceRequest(
                str(index),
                tuple(rng.randrange(3, 300) for _ in range(rng.randint(1, 90))),
                max_tokens=rng.randint(1, 60),
                temperature=rng.choice([0.0, 1.0]),
                seed=index,
            )
            for index in range(24)
        ]
        futures = [submit(run, request) for request in requests]
        return [future.result(60).token_ids for future in futures]

    reference = tokens(num_workers=1)
    assert all(reference)
    assert tokens(num_workers=2, max_active=3, step_tokens=7) == reference
    assert tokens(num_workers=1, max_active=1) == reference
    assert tokens(groups=[tuple(sorted(os.sched_getaffinity(0)))]) == reference  # one step on all cores


def test_a_group_of_cores_has_one_thread_on_each(engine):
    cores = tuple(sorted(os.sched_getaffinity(0)))[:2]
    run = engine(fake=False, groups=[cores])
    assert run.wait_ready(60)
    submit(run, SequenceRequest("a", (5, 6), max_tokens=3)).result(60)
    (pid,) = pids(run)
    assert tuple(os.sched_getaffinity(pid)) == cores == tuple(run.stats()["workers"][0]["cores"])
    threads = [tuple(os.sched_getaffinity(thread.id)) for thread in psutil.Process(pid).threads()]
    assert set(threads) >= {(core,) for core in cores}


def test_killed_workers_cost_nothing_but_time(engine, sim, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.005")
    run = engine(2, max_active=4)
    requests = rows(sim, 60)
    futures = [submit(run, request) for request in requests]
    killed = set()
    while len(killed) < 4:
        assert not all(future.done() for future in futures)
        index = random.randrange(2)
        victim = run._shell.places[index].pid
        # Only one that has got something done: two deaths in a row without, and it would not be started again.
        if victim and run._shell.scheduler.slots[index].stepped and victim not in killed:
            killed.add(victim)
            os.kill(victim, signal.SIGKILL)
        time.sleep(0.05)
    for request, future in zip(requests, futures, strict=True):
        assert outcome(future.result(60)) == sim.expected(request)
    run._shell.scheduler.check()
    assert all(gone(pid) for pid in killed)
    wait_for(lambda: len(deaths(run)) == 4)  # each is told a moment after its process is gone
    assert {death["pid"] for death in deaths(run)} == killed
    assert {death["cause"] for death in deaths(run)} == {"killed by SIGKILL"}
    wait_for(lambda: sum(worker["restarts"] for worker in run.stats()["workers"]) == 4)  # told before it is done
    children = pids(run)
    run.close()
    assert all(gone(pid) for pid in children)


def deaths(engine) -> list[dict]:
    return [event for event in engine.events if event["event"] == "worker_died"]


def test_a_stopped_worker_is_killed_and_costs_nothing_but_time(engine, sim, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.005")
    run = engine(2, max_active=4, stuck_after=1)
    requests = rows(sim, 60)
    futures = [submit(run, request) for request in requests]
    wait_for(lambda: all(place.counters["active"] for place in run._shell.places))
    victim = run._shell.places[1].pid
    os.kill(victim, signal.SIGSTOP)
    begun = time.monotonic()
    wait_for(lambda: deaths(run))
    assert 0.9 < time.monotonic() - begun < 30
    (death,) = deaths(run)
    assert death["pid"] == victim
    assert death["cause"] == "stuck: stopped by a signal, no operation completed for 1 s"
    for request, future in zip(requests, futures, strict=True):
        assert outcome(future.result(60)) == sim.expected(request)
    assert gone(victim)


def test_a_worker_that_is_stopped_while_it_starts(engine, sim, monkeypatch):
    run = engine(1, stuck_after=1)
    (victim,) = pids(run)
    os.kill(victim, signal.SIGSTOP)
    request = rows(sim, 1)[0]
    assert outcome(submit(run, request).result(60)) == sim.expected(request)
    assert [death["pid"] for death in deaths(run)] == [victim]


def test_a_row_that_never_ends_is_set_aside_alone(engine, sim, monkeypatch):
    monkeypatch.setenv("FAKE_HANG", "1")
    run = engine(2, max_active=4, stuck_after=1)
    requests = rows(sim, 12)
    requests[7].prompt_ids += (sim.POISON,)
    futures = [submit(run, request) for request in requests]
    for index, (request, future) in enumerate(zip(requests, futures, strict=True)):
        result = future.result(60)
        if index == 7:
            assert result.error.code == "worker_crashed"
            assert "stuck: no operation completed for 1 s" in result.error.message
        else:
            assert outcome(result) == sim.expected(request)


def test_an_idle_worker_may_be_stopped(engine, sim):
    run = engine(1, stuck_after=1)
    assert run.wait_ready(60)
    (pid,) = pids(run)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(pid, signal.SIGCONT)
    request = rows(sim, 1)[0]
    assert outcome(submit(run, request).result(60)) == sim.expected(request)
    assert not deaths(run)


def test_a_worker_that_waits_for_blocks_is_asked_and_lives(engine, sim, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.005")
    run = engine(1, stuck_after=1)
    assert run.wait_ready(60)
    shell, heard = run._shell, []
    (worker,) = shell.pool.processes.values()
    # As if it had work: nothing is computed, so only its answers show that it lives.
    monkeypatch.setattr(shell, "_has_work", lambda process: True)
    submit(run, SequenceRequest("a", (1, 2), max_tokens=5)).result(60)
    for _ in range(4):
        heard.append(worker.num_heard)
        time.sleep(0.6)
    assert not deaths(run)
    assert heard[-1] > heard[0]


@pytest.mark.parametrize("way", ["SIGSEGV", "exception"])
def test_a_row_that_kills_workers_is_set_aside_alone(engine, sim, monkeypatch, way):
    if way == "exception":
        monkeypatch.setenv("FAKE_RAISE", "1")
    run = engine(2, max_active=4)
    requests = rows(sim, 24)
    requests[7].prompt_ids += (sim.POISON,)
    futures = [submit(run, request) for request in requests]
    for index, (request, future) in enumerate(zip(requests, futures, strict=True)):
        result = future.result(60)
        if index == 7:
            assert result.error.code == "worker_crashed"
            assert ("SIGSEGV" if way == "SIGSEGV" else "this row is poison") in result.error.message
        else:
            assert outcome(result) == sim.expected(request)
    if way == "exception":
        died = next(event for event in run.events if event["event"] == "worker_died")
        assert "fake_worker.py" in died["traceback"]


def test_submitting_from_many_threads(engine, sim):
    run = engine(2)
    requests = rows(sim, 160)
    futures: list[Future | None] = [None] * 160

    def part(first: int) -> None:
        for index in range(first, 160, 8):
            futures[index] = submit(run, requests[index])

    threads = [threading.Thread(target=part, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for request, future in zip(requests, futures, strict=True):
        assert outcome(future.result(60)) == sim.expected(request)


def test_cancel_frees_the_blocks_within_a_step(engine, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.01")
    run = engine(max_active=1)
    first = submit(run, SequenceRequest("runs", (1, 2, 3), max_tokens=300, seed=1))
    second = submit(run, SequenceRequest("waits", (1, 2, 3), max_tokens=300, seed=1))
    wait_for(lambda: running(run))
    run.cancel(second.ticket)
    assert second.result(1).error.code == "cancelled"
    begun = time.monotonic()
    run.cancel(first.ticket)
    assert first.result(1).error.code == "cancelled"
    wait_for(lambda: not running(run))
    assert time.monotonic() - begun < 30
    run.cancel(first.ticket)  # too late, which is no error


def test_closing_answers_everybody(engine, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.01")
    run = engine(2, max_active=2)
    futures = [submit(run, SequenceRequest(str(n), (1, 2), max_tokens=200, seed=n)) for n in range(10)]
    time.sleep(0.2)
    children = pids(run)
    begun = time.monotonic()
    run.close()
    assert time.monotonic() - begun < 30
    assert not wait(futures, 0).not_done
    codes = {future.result().error.code for future in futures if future.result().error}
    assert codes == {"engine_closed"} <= NOT_THE_REQUESTS_FAULT
    assert all(gone(pid, 0.1) for pid in children)
    with pytest.raises(EngineClosedError):
        run.submit(SequenceRequest("late", (1,), 1), lambda result: None)
    assert [worker["cores"] for worker in run.stats()["workers"]]  # the last state stays
    run.close()


def test_closing_does_not_wait_for_stopped_workers(engine):
    run = engine(2)
    assert run.wait_ready(60)
    children = pids(run)
    for pid in children:
        os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    run.close()
    assert time.monotonic() - begun < 30  # 0.7 s, on an idle machine; stopped ones would stay for ever
    assert all(gone(pid) for pid in children)


def test_watching_one_that_finishes_meanwhile_leaves_nothing(engine, sim, monkeypatch):
    run = engine()
    request, other = rows(sim, 2)
    future = submit(run, request)
    assert outcome(future.result(60)) == sim.expected(request)

    class Before(dict):
        """Whoever looks first is told what was so before the row finished."""

        looked = False

        def __contains__(self, ticket):
            self.looked, before = True, not self.looked
            return before or super().__contains__(ticket)

    monkeypatch.setattr(run, "_waiting", Before())
    run.watch(future.ticket, lambda text: None)
    assert outcome(submit(run, other).result(60)) == sim.expected(other)
    assert not run._waiting and not run._watching


def test_a_callback_that_raises_is_its_own_affair(engine, sim, caplog):
    run = engine()

    def broken(result):
        raise ValueError("not my day")

    run.submit(SequenceRequest("a", (1,), 1), broken)
    request = rows(sim, 1)[0]
    assert outcome(submit(run, request).result(60)) == sim.expected(request)
    wait_for(lambda: "not my day" in caplog.text)  # this row is more urgent, so it may end first


def test_stats_have_the_names_scripts_rely_on(engine):
    run = engine(2)
    assert run.wait_ready(60)
    submit(run, SequenceRequest("a", tuple(range(1, 41)), max_tokens=5, seed=3)).result(60)
    stats = run.stats()
    assert stats["queue"] == {"waiting": 0, "running": 0, "finished": 1, "failed": 0}
    assert 0 < stats["startup_seconds"] < 10
    for worker in stats["workers"]:
        process = psutil.Process(worker["pid"])
        assert process.cpu_affinity() == worker["cores"]
        assert worker["rss_bytes"] >= worker["pss_bytes"] > 1 << 20
        split = [worker[f"pss_{part}_bytes"] for part in ("weights", "arena", "private")]
        assert sum(split) == worker["pss_bytes"]
    busy, idle = sorted(stats["workers"], key=lambda worker: -worker["steps"])
    assert (busy["prefill_tokens"], busy["decode_tokens"], busy["mean_batch"]) == (40, 5, 1.0)
    assert busy["busy_seconds"] > 0 and busy["pss_arena_bytes"] > 0
    assert (idle["prefill_tokens"], idle["steps"], idle["mean_batch"]) == (0, 0, 0.0)


def test_nothing_lies_in_the_file_system_while_it_runs(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    run = engine(2)
    assert run.wait_ready(60)
    assert list(tmp_path.iterdir()) == []
    os.kill(pids(run)[0], signal.SIGKILL)
    wait_for(lambda: run.stats()["workers"][0]["restarts"] == 1)
    wait_for(lambda: run.stats()["workers"][0]["state"] == "ready")
    assert list(tmp_path.iterdir()) == []
    submit(run, SequenceRequest("a", (1, 2), max_tokens=5)).result(60)


def test_idle_costs_no_cpu(engine):
    run = engine(2, fake=False)
    assert run.wait_ready(60)
    submit(run, SequenceRequest("a", (5, 6), max_tokens=5)).result(60)
    time.sleep(0.2)
    workers = [psutil.Process(pid) for pid in pids(run)]

    def used() -> list[float]:
        return [time.process_time(), *(sum(process.cpu_times()[:2]) for process in workers)]

    before = used()
    time.sleep(2)
    assert max(after - then for after, then in zip(used(), before, strict=True)) < 0.03


def test_workers_ignore_ctrl_c(engine, sim):
    run = engine(2)
    for pid in pids(run):  # also while they are still starting
        os.kill(pid, signal.SIGINT)
    assert run.wait_ready(60)
    for pid in pids(run):
        os.kill(pid, signal.SIGINT)
    request = rows(sim, 1)[0]
    assert outcome(submit(run, request).result(60)) == sim.expected(request)
    assert not [event for event in run.events if event["event"] == "worker_died"]


def test_a_model_that_cannot_be_loaded(engine, monkeypatch):
    monkeypatch.setenv("FAKE_LOAD_ERROR", "the weights are made of cheese")
    run = engine(2)
    waiting = submit(run, SequenceRequest("a", (1,), 1))
    with pytest.raises(WorkerStartError, match="made of cheese"):
        run.wait_ready(60)
    assert waiting.result(60).error.code == "engine_failed"
    with pytest.raises(WorkerStartError, match="made of cheese"):
        run.submit(SequenceRequest("b", (1,), 1), lambda result: None)


def test_workers_that_die_at_start(engine, monkeypatch):
    monkeypatch.setenv("FAKE_DIE_AT_START", str(int(signal.SIGABRT)))
    run = engine(2)
    with pytest.raises(WorkerStartError, match="SIGABRT"):
        run.wait_ready(20)


def test_a_worker_that_is_not_where_it_should_be(engine, monkeypatch):
    monkeypatch.setenv("FAKE_AFFINITY", "1")
    with pytest.raises(WorkerStartError, match=r"may run on CPUs \[.*4095\] but was pinned to"):
        engine().wait_ready(60)


def test_a_worker_of_another_version(engine, monkeypatch):
    monkeypatch.setenv("FAKE_PROTOCOL", "99")
    with pytest.raises(WorkerStartError, match="speaks protocol 99"):
        engine().wait_ready(60)


def test_a_core_that_does_not_exist(engine):
    before = set(psutil.Process().children())  # the fork server of another test may be among them
    with pytest.raises(UnsupportedHostError, match=r"pinning worker 0 to CPUs \[5000\]"):
        engine(groups=[(5000,)])
    children = set(psutil.Process().children()) - before
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_a_forked_child_gets_a_clear_error(engine):
    run = engine()
    assert run.wait_ready(60)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run.submit(SequenceRequest("a", (1,), 1), lambda result: None)
        except EngineError as error:
            os.write(write_end, str(error).encode())
        run.close()
        os._exit(0)
    os.close(write_end)
    with open(read_end) as answer:
        assert "forked" in answer.read()
    assert os.waitpid(child, 0)[1] == 0
    assert submit(run, SequenceRequest("a", (1,), 1)).result(60).error is None  # the parent's goes on


def test_a_forked_child_does_not_keep_workers_alive(engine):
    run = engine()
    assert run.wait_ready(60)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        (pid,) = pids(run)
        os.kill(pid, signal.SIGSTOP)  # cannot hear Stop; continues when its lifeline has ended
        threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
        begun = time.monotonic()
        run.close()
        assert time.monotonic() - begun < 30
        assert gone(pid)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_fewer_and_more_workers_while_rows_run(engine, sim, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.004")
    run = engine(2, max_active=8)
    assert run.wait_ready(60)
    requests = rows(sim, 60)
    futures = [submit(run, request) for request in requests]
    wait_for(lambda: all(place.counters["active"] for place in run._shell.places))
    run.set_workers(1)
    wait_for(lambda: run.stats(measure=False)["workers"][1]["state"] == "stopped")
    assert not all(future.done() for future in futures)
    assert [event["event"] for event in run.events].count("worker_stopped") == 1 and not deaths(run)
    run.set_workers(2)
    wait_for(lambda: run.stats(measure=False)["workers"][1]["state"] == "ready")
    for request, future in zip(requests, futures, strict=True):
        assert outcome(future.result(60)) == sim.expected(request)
    sequences = run.stats()["sequences"]
    assert sequences["moved"] > 0 and sequences["recomputed_tokens"] == 0
    with pytest.raises(ConfigError, match="workers is 3: this engine has core groups for 1 to 2"):
        run.set_workers(3)
