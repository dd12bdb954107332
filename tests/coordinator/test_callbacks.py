"""What callers' own functions do on threads of ours: raise, end threads that are not theirs, close everything."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, CancelledError, as_completed, wait

import pytest

from coremill.config.errors import EngineClosedError, RequestError
from coremill.coordinator import Coordinator

CONTEXT = 400
TOO_LONG = "xq" * CONTEXT
# What a job comes to is found out by the text service's thread, or by the engine's.
FAILS_AS_TEXT, RUNS = {"prompt": TOO_LONG}, {"prompt_ids": [9], "max_tokens": 2}


@pytest.fixture
def started(tiny_pack):
    """start(**options) -> a Coordinator, whose threads and processes must be gone after the test."""
    made = []

    def start(**options) -> Coordinator:
        made.append(Coordinator(tiny_pack, workers=1, ctx=CONTEXT, **options))
        return made[-1]

    yield start
    for coordinator in made:
        coordinator.close()
        assert not coordinator._backend.text._thread.is_alive() and not coordinator._backend.engine._thread.is_alive()


def with_callback(coordinator: Coordinator, given: dict, callback) -> None:
    """Submit a job whose callback runs on a thread of ours, and wait until it does. To a coordinator that has just
    begun to load, as the first job must not be done at once."""
    entered = threading.Event()
    hold = threading.Event()
    # The one thread is busy with the first callback until the second job's is in place.
    first = coordinator.submit(**given)
    first.add_done_callback(lambda job: (entered.set(), hold.wait(30)))
    assert entered.wait(30)
    job = coordinator.submit(**given)
    job.add_done_callback(callback)
    hold.set()
    wait([job], 30)


@pytest.mark.parametrize("error", [ValueError("not my day"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("given", [FAILS_AS_TEXT, RUNS], ids=["text", "engine"])
def test_a_callback_that_raises(started, caplog, given, error):
    coordinator = started()

    def broken(job):
        raise error

    with_callback(coordinator, given, broken)
    assert coordinator.submit(**RUNS).result(30).token_ids
    with pytest.raises(RequestError):
        coordinator.submit(**FAILS_AS_TEXT).result(30)
    assert type(error).__name__ in caplog.text


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_observer_that_raises(started, error):
    def broken(event):
        raise error

    assert started(on_event=broken).submit(**RUNS).result(30).token_ids


@pytest.mark.parametrize("given", [FAILS_AS_TEXT, RUNS], ids=["text", "engine"])
def test_close_in_a_callback(started, given):
    coordinator = started()
    closed = []
    waiting = coordinator.submit("a", max_tokens=390)

    def close(job):
        coordinator.close()
        closed.append(True)

    with_callback(coordinator, given, close)
    assert isinstance(waiting.exception(30), (EngineClosedError, type(None)))
    coordinator._backend.engine._thread.join(30)
    assert closed == [True]
    with pytest.raises(EngineClosedError):
        coordinator.submit("a").result(30)


def test_both_threads_close_at_once(started):
    coordinator = started()
    together = threading.Barrier(2, timeout=30)

    def close(job):
        together.wait()
        coordinator.close()

    threads = [
        threading.Thread(target=with_callback, args=(coordinator, given, close)) for given in (FAILS_AS_TEXT, RUNS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    coordinator._backend.text._thread.join(30)
    coordinator._backend.engine._thread.join(30)
    assert not together.broken


def test_who_waits_for_several_hears_of_cancelled_ones(started):
    coordinator = started()
    release = threading.Event()
    coordinator.submit(**FAILS_AS_TEXT).add_done_callback(lambda job: release.wait(30))
    jobs = [coordinator.submit("a", max_tokens=300, seed=n) for n in range(40)]  # none is tokenised yet
    assert wait(jobs, 0.01).done == set()
    waiter = threading.Timer(0.05, lambda: [job.cancel() for job in jobs])
    waiter.start()
    assert wait(jobs, 30, FIRST_COMPLETED).done
    assert not wait(jobs, 30).not_done
    assert set(as_completed(jobs, 30)) == set(jobs)
    assert all(job.cancel() for job in jobs)  # once more, which is no error
    release.set()
    with pytest.raises(CancelledError):
        jobs[0].result(30)
    assert coordinator.submit(**RUNS).result(30).token_ids


def test_cancelled_by_many_at_any_moment(started):
    coordinator = started()
    jobs = [coordinator.submit("a", max_tokens=1 + n % 7, seed=n) for n in range(200)]

    def cancel() -> None:
        for job in jobs:
            job.cancel()

    threads = [threading.Thread(target=cancel) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wait(jobs, 30).not_done
    assert coordinator.submit(**RUNS).result(30).token_ids
