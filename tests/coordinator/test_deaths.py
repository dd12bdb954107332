"""Deaths of real workers on a real (tiny) model: whose fault each was, and what the run does about it."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from concurrent.futures import Future
from functools import partial

import pytest

from coremill.config.engine import EngineConfig
from coremill.config.errors import EngineError, RequestError
from coremill.config.request import SequenceRequest
from coremill.config.topology import CoreGroup
from coremill.coordinator import Completion, Coordinator
from coremill.coordinator.engine import Engine


@pytest.fixture
def pack(tiny_pack, tmp_path):
    """A copy that may be spoiled."""
    return shutil.copy(tiny_pack, tmp_path / "model.pack")


@pytest.fixture
def start(pack):
    engines = []

    def make(num_workers=2, **config) -> Engine:
        events: list[dict] = []
        cores = sorted(os.sched_getaffinity(0))
        groups = [CoreGroup((cores[index % len(cores)],)) for index in range(num_workers)]
        engine = Engine(pack, EngineConfig(**config), groups, on_event=events.append, stop_ids=())
        engine.events = events
        engines.append(engine)
        engine.start()
        assert engine.wait_ready(60)
        return engine

    yield make
    for engine in engines:
        engine.close()


def submit(engine, request: SequenceRequest) -> Future:
    future: Future = Future()
    engine.submit(request, future.set_result)
    return future


def long_rows(count: int) -> list[SequenceRequest]:
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(3, 300) for _ in range(20)) for _ in range(count)]
    return [SequenceRequest(str(index), prompt, max_tokens=400, seed=index) for index, prompt in enumerate(prompts)]


def deaths(engine) -> list[dict]:
    return [event for event in engine.events if event["event"] == "worker_died"]


def assert_ended_by(engine, futures, cause: str) -> None:
    """The run ends for this cause; no row is blamed, none runs again."""
    results = [future.result(60) for future in futures]
    errors = {result.error.code for result in results if result.error is not None}
    assert errors == {"engine_failed"}
    engine.close()
    assert isinstance(engine.failure, EngineError) and re.search(cause, str(engine.failure))
    assert sum(worker["restarts"] for worker in engine.stats()["workers"]) == 0


def wait_until_all_work(engine) -> None:
    deadline = time.monotonic() + 60
    while not all(place.counters["steps"] > 1 for place in engine._shell.places):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_pack_cut_off_under_the_workers_ends_the_run(start, pack):
    run = start()
    size = os.path.getsize(pack)
    futures = [submit(run, request) for request in long_rows(12)]
    wait_until_all_work(run)
    os.truncate(pack, 4096)
    assert_ended_by(run, futures, rf"died \(killed by SIGBUS\): .*model.pack: .* cut to 4096 of {size} bytes")


def test_a_pack_written_to_ends_the_run_with_the_next_death(start, pack):
    run = start()
    futures = [submit(run, request) for request in long_rows(12)]
    wait_until_all_work(run)
    with open(pack, "r+b") as file:
        file.write(b"COREMILL")
    os.kill(run._shell.places[0].pid, signal.SIGKILL)
    assert_ended_by(run, futures, "model.pack: the packed model was written to during the run")


def test_a_pack_replaced_by_another_is_not_mapped_by_new_workers(start, pack, tmp_path):
    run = start()
    futures = [submit(run, request) for request in long_rows(12)]
    wait_until_all_work(run)
    (tmp_path / "other").write_bytes(b"another model")
    os.replace(tmp_path / "other", pack)
    os.kill(run._shell.places[1].pid, signal.SIGKILL)
    assert_ended_by(run, futures, "model.pack: the packed model was replaced by another during the run")


def test_a_pack_made_once_more_is_the_same(start, pack, tmp_path):
    run = start()
    reference = [submit(run, request).result(60).token_ids for request in long_rows(3)]
    futures = [submit(run, request) for request in long_rows(3)]
    shutil.copy(pack, tmp_path / "again")
    os.replace(tmp_path / "again", pack)
    os.kill(run._shell.places[1].pid, signal.SIGKILL)
    assert [future.result(60).token_ids for future in futures] == reference
    assert [death["cause"] for death in deaths(run)] == ["killed by SIGKILL"]


def test_a_sigbus_of_the_workers_own_is_a_crash(start):
    run = start(num_workers=1)
    futures = [submit(run, request) for request in long_rows(1)]
    wait_until_all_work(run)
    os.kill(run._shell.places[0].pid, signal.SIGBUS)
    assert futures[0].result(60).error is None
    assert [death["cause"] for death in deaths(run)] == ["killed by SIGBUS"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_ended_from_outside_again_and_again_charges_nobody(start, number, request):
    """Far more often than a row may crash its worker; each time it has come a little further."""
    if number != signal.SIGKILL:  # a shell starts background jobs with some ignored, and workers inherit that
        request.addfinalizer(partial(signal.signal, number, signal.signal(number, signal.SIG_DFL)))
    run = start(num_workers=1)
    (future,) = [submit(run, request) for request in long_rows(1)]

    def acknowledged() -> int:
        return sum(len(sequence.tokens) for sequence in list(run._shell.scheduler.sequences.values()))

    for _ in range(5):
        before = acknowledged()
        deadline = time.monotonic() + 60
        while acknowledged() <= before and not future.done():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        seen = len(deaths(run))
        if future.done():
            break
        os.kill(run._shell.places[0].pid, number)
        while len(deaths(run)) == seen:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    result = future.result(60)
    assert result.error is None and len(result.token_ids) == 400
    assert {death["cause"] for death in deaths(run)} == {f"killed by {number.name}"}
    assert run.stats()["sequences"]["recomputed_tokens"] == 0


def test_recomputed_tokens_are_none(start):
    """Whoever goes on after a death goes on at the last acknowledged position."""
    run = start()
    futures = [submit(run, request) for request in long_rows(8)]
    wait_until_all_work(run)
    for index in (0, 1):
        os.kill(run._shell.places[index].pid, signal.SIGKILL)
        time.sleep(0.3)
    assert all(future.result(60).error is None for future in futures)
    assert run.stats()["sequences"]["recomputed_tokens"] == 0


@pytest.mark.parametrize("what", ["SIGSEGV", "SIGABRT", "SIGILL", "HANG"])
def test_a_poison_row_is_set_aside_alone(start, pack, monkeypatch, what):
    from coremill.native.packfile import open_pack

    with open_pack(pack) as opened:
        poison = next(token for token in range(3, 300) if len(bytes(opened.token_bytes[token])) >= 1)
        text = bytes(opened.token_bytes[poison])
        clean = [token for token in range(3, 300) if text not in bytes(opened.token_bytes[token])][:100]
    monkeypatch.setenv("COREMILL_TEST_POISON", f"{what}:{text.decode()}")
    run = start(stuck_after=1)
    rng = random.Random(1)
    requests = [SequenceRequest(str(index), tuple(rng.choices(clean, k=9)), max_tokens=20) for index in range(24)]
    requests[11].prompt_ids += (poison,)
    results = [submit(run, request) for request in requests]
    for index, future in enumerate(results):
        result = future.result(60)
        assert (result.error is not None) == (index == 11)
    error = results[11].result().error
    assert error.code == "worker_crashed"
    assert ("stuck: no operation completed for 1 s" if what == "HANG" else f"killed by {what}") in error.message


def test_the_error_of_a_poison_job_says_how_to_run_it_alone(pack, monkeypatch):
    """In Python too: the call that it shows fails alone in the same way, and succeeds when the cause is gone."""
    monkeypatch.setenv("COREMILL_TEST_POISON", "SIGSEGV:volcano")
    text = "a volcano that"
    with Coordinator(pack, ctx=400, kv="q8") as several:
        job = several.submit(text, max_tokens=6, temperature=0.5, stop=["zz"])
        with pytest.raises(RequestError) as caught:
            job.result(60)
    message, _, advice = str(caught.value).partition("; this runs it alone, with its ")
    assert caught.value.code == "worker_crashed" and "killed by SIGSEGV" in message
    count, _, call = advice.partition(" prompt tokens: ")
    assert re.fullmatch(
        r"Coordinator\('.*', workers=1, ctx=400, kv='q8'\)"
        r"\.submit\(prompt=\.\.\., max_tokens=6, seed=\d+, temperature=0\.5, stop=\('zz',\)\)",
        call,
    )
    made, _, submitted = call.partition(".submit")

    def again() -> Completion:
        with eval(made, {"Coordinator": Coordinator}) as alone:
            return eval(f"alone.submit{submitted.replace('...', repr(text))}", {"alone": alone}).result(60)

    with pytest.raises(RequestError, match="killed by SIGSEGV"):
        again()
    monkeypatch.delenv("COREMILL_TEST_POISON")
    completion = again()
    assert completion.usage.prompt_tokens == int(count)
    with Coordinator(pack, ctx=400, kv="q8") as several:
        expected = several.submit(text, max_tokens=6, temperature=0.5, stop=["zz"], custom_id=job.custom_id).result(60)
    assert (completion.text, completion.token_ids) == (expected.text, expected.token_ids)
