"""What can be seen of an engine that works, and pausing it, with real worker processes."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from concurrent.futures import Future

import pytest

from coremill.config.errors import EngineClosedError


def submit(run, request) -> Future:
    done: Future = Future()
    run.submit(request, done.set_result)
    return done


def rows(sim, count: int):
    rng = random.Random(7)
    return [sim.random_request(rng, f"row {i}") for i in range(count)]


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited a minute in vain"
        time.sleep(0.005)


def outcome(result):
    assert result.error is None, result.error
    return result.token_ids, result.text, result.finish_reason


def test_paused_sequences_rest_and_end_as_if_nothing_had_happened(engine, sim, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.004")
    run = engine(2, max_active=4)
    assert run.wait_ready(60)
    requests = rows(sim, 40)
    futures = [submit(run, request) for request in requests]
    wait_for(lambda: all(worker["steps"] for worker in run.glance()["workers"]))
    run.pause()
    wait_for(lambda: run.glance()["paused"] and not any(worker["active"] for worker in run.glance()["workers"]))
    steps = [worker["steps"] for worker in run.glance()["workers"]]
    late = submit(run, sim.random_request(random.Random(8), "late"))
    wait_for(lambda: run.glance()["queue"]["waiting"] + sum(future.done() for future in futures) == 41)
    run.cancel(*run.find("late"))
    assert late.result(60).error.code == "cancelled" and run.find("late") == []
    assert [worker["steps"] for worker in run.glance()["workers"]] == steps
    run.pause(False)
    for request, future in zip(requests, futures, strict=True):
        assert outcome(future.result(60)) == sim.expected(request)
    assert run.stats()["sequences"]["recomputed_tokens"] == 0


def test_a_paused_engine_survives_deaths_and_other_numbers_of_workers(engine, sim, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.004")
    run = engine(2, max_active=4)
    assert run.wait_ready(60)
    requests = rows(sim, 30)
    futures = [submit(run, request) for request in requests]
    wait_for(lambda: all(worker["steps"] for worker in run.glance()["workers"]))
    run.pause()
    wait_for(lambda: not any(worker["active"] for worker in run.glance()["workers"]))
    os.kill(run.glance()["workers"][0]["pid"], signal.SIGKILL)
    wait_for(lambda: run.glance()["workers"][0]["restarts"] == 1)
    run.set_workers(1)
    wait_for(lambda: run.glance()["workers"][1]["state"] == "stopped")
    run.pause(False)
    for request, future in zip(requests, futures, strict=True):
        assert outcome(future.result(60)) == sim.expected(request)


def test_a_glance_adds_up_and_is_plain_json(engine, sim, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.004")
    run = engine(2, max_active=4)
    assert run.wait_ready(60)
    futures = [submit(run, request) for request in rows(sim, 30)]
    wait_for(lambda: all(worker["steps"] for worker in run.glance()["workers"]))
    seen = run.glance(max_rows=2)
    assert json.loads(json.dumps(seen)).keys() == seen.keys()
    assert all(len(worker["rows"]) <= 2 for worker in seen["workers"])
    keys = {f"row {i}" for i in range(30)}
    for worker in seen["workers"]:
        for key, phase, num_prompt, num_new, most in worker["rows"]:
            assert key in keys and phase in ("queued", "prefill", "decode") and num_prompt > 0 and num_new <= most
    results = [future.result(60) for future in futures]
    wait_for(lambda: not any(worker["active"] for worker in run.glance()["workers"]))
    seen, stats = run.glance(max_rows=9), run.stats()
    assert sum(worker["decode_tokens"] for worker in seen["workers"]) == sum(len(r.token_ids) for r in results)
    assert sum(worker["cached_tokens"] for worker in seen["workers"]) == sum(r.cached_tokens for r in results)
    assert seen["queue"] == stats["queue"] == {"waiting": 0, "running": 0, "finished": 30, "failed": 0}
    assert not any(worker["rows"] or worker["blocks"] for worker in seen["workers"])
    assert all(worker["kv_positions"] >= worker["step_rows"] for worker in seen["workers"])
    for name in ("free_blocks", "cached_blocks", "blocks"):
        assert seen["arena"][name] == stats["arena"][name]


def test_looking_from_many_threads_while_rows_come_and_go(engine, sim):
    """Sizes of dicts change under those who look."""
    run = engine(2, max_active=8)
    assert run.wait_ready(60)
    failures: list[BaseException] = []
    ended = threading.Event()

    def look() -> None:
        try:
            while not ended.is_set():
                run.glance(max_rows=8)
                run.stats(measure=False)
                run.find("row 3")
        except BaseException as error:
            failures.append(error)

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    futures = [submit(run, request) for request in rows(sim, 300)]
    for future in futures:
        assert future.result(60).error is None
    ended.set()
    for looker in lookers:
        looker.join()
    assert not failures


def test_nothing_is_to_be_seen_after_the_end(engine):
    run = engine(1)
    run.close()
    for call in (run.glance, run.pause):
        with pytest.raises(EngineClosedError):
            call()
