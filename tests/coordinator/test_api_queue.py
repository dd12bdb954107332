"""Who runs when, who waits, and who stops: cancelling, deadlines, priorities, the limit of the queue, retries."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from concurrent.futures import CancelledError, wait

import pytest

from coremill.config.errors import ConfigError, EngineClosedError, EngineError, QueueFullError, RequestError
from coremill.config.request import SequenceRequest
from coremill.coordinator.timers import Timer, Timers


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.002)


def counters(coordinator, index: int = 0):
    return coordinator._backend.engine._shell.places[index].counters


# ---- cancelling ----


@pytest.mark.parametrize(("num_prompt", "step"), [(300, 4), (20, 12)], ids=["prefill", "decode"])
def test_cancel_stops_within_a_step(coordinator, monkeypatch, sim, num_prompt, step):
    """Counted: the step in which the worker is told is the last one. It lasts until the worker is told."""
    monkeypatch.setenv("FAKE_HOLD_STEP", str(step))
    held = coordinator(fake=True, ctx=512, step_tokens=32, stuck_after=3600)
    ids, limit = [5] * num_prompt, 200
    seed = next(n for n in range(99) if sim.expected(SequenceRequest("", tuple(ids), limit, seed=n))[2] == "length")
    job = held.submit(prompt_ids=ids, max_tokens=limit, seed=seed)
    wait_until(lambda: counters(held)["operations"])
    assert job.cancel()
    with pytest.raises(CancelledError):
        job.result(60)
    after = held.submit(prompt_ids=[7] * 10, max_tokens=4).result(60)
    num_chunks = -(-num_prompt // 32)
    assert counters(held)["steps"] == step + len(after.token_ids)
    assert counters(held)["prefill_tokens"] == min(32 * step, num_prompt) + 10
    assert counters(held)["decode_tokens"] == max(0, step - num_chunks + 1) + len(after.token_ids)
    assert held.drain(60)


def test_cancel_while_it_waits_and_all_at_once(coordinator):
    one = coordinator(ctx=400, workers=1, max_active=1)
    jobs = [one.submit(prompt_ids=[5], max_tokens=390, seed=n) for n in range(20)]
    one.cancel_all()
    assert not wait(jobs, 60).not_done
    assert sum(job.cancelled() for job in jobs) >= 19
    assert one.drain(60) and one.stats()["queue"]["unfinished"] == 0
    assert one.submit("a", max_tokens=1).result(60)


# ---- deadlines ----


def test_a_job_ends_at_its_deadline_wherever_it_is(coordinator, monkeypatch):
    monkeypatch.setenv("FAKE_HOLD_STEP", "5")
    held = coordinator(fake=True, ctx=400, max_active=1, stuck_after=3600)
    running = held.submit(prompt_ids=[5], max_tokens=300, timeout=0.3)
    waiting = held.submit(prompt_ids=[6], max_tokens=300, deadline=time.time() + 0.2)
    dated = held.submit(
        prompt_ids=[6], max_tokens=300, timeout=1e6, deadline=datetime.datetime.now() + datetime.timedelta(seconds=0.1)
    )
    for job in (running, waiting, dated):
        with pytest.raises(RequestError, match="deadline") as caught:
            job.result(60)
        assert caught.value.code == "deadline_exceeded"
    assert held.submit(prompt_ids=[7], max_tokens=3, timeout=3600).result(60).token_ids
    assert held.drain(60)


def test_a_deadline_that_has_passed_and_one_while_the_text_is_being_read(coordinator):
    one = coordinator(ctx=400, workers=1)
    assert one.count_tokens("a") == 1  # the helper is there
    os.kill(one._backend.text.pid, signal.SIGSTOP)
    try:
        for options in ({"timeout": 0.05}, {"deadline": 1.0}):
            with pytest.raises(RequestError, match="deadline"):
                one.submit("a b c", max_tokens=3, **options).result(60)
    finally:
        os.kill(one._backend.text.pid, signal.SIGCONT)
    assert one.submit("a b c", max_tokens=3).result(60).token_ids


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("timeout", [0, -1, "1", float("nan"), 1e12]), ("deadline", ["now", -5.0, True]), ("retries", [-1, 1.5, 1000])],
)
def test_options_of_a_job_are_checked_by_name(coordinator, name, wrong):
    one = coordinator(fake=True)
    for value in wrong:
        with pytest.raises(RequestError, match=f"'{name}' is"):
            one.submit(prompt_ids=[5], **{name: value})


def test_timers_forget_what_is_cancelled():
    timers, called = Timers(), []
    kept = [Timer(when, lambda when=when: called.append(when)) for when in (3.0, 1.0, 2.0)]
    for timer in kept:
        timers.add(timer)
    for _ in range(10_000):
        cancelled = Timer(5.0, called.clear)
        timers.add(cancelled)
        cancelled.cancel()
    assert len(timers) < 200
    assert timers.seconds_left(0.5) == 0.5
    for call in timers.due(2.5):
        call()
    assert called == [1.0, 2.0] and timers.seconds_left(10.0) == 0.0
    kept[0].cancel()
    assert timers.seconds_left(0.0) is None


# ---- priorities ----


def test_an_urgent_job_runs_while_the_others_rest_and_lose_nothing(coordinator):
    prompts = [[5 + n % 3, *range(20, 40 + n)] for n in range(30)]
    # Memory for all of them: when blocks are short, who rests lends his to the urgent one and recomputes them.
    two = coordinator(ctx=500, workers=min(2, os.cpu_count() or 1), max_active=16, arena="8MiB")
    engine = two._backend.engine

    def run(with_urgent: bool) -> list[tuple[str, tuple[int, ...]]]:
        jobs = [two.submit(prompt_ids=ids, max_tokens=400, seed=n) for n, ids in enumerate(prompts)]
        if with_urgent:
            watch_urgent(jobs)
        return [(job.result(120).text, job.result().token_ids) for job in jobs]

    def watch_urgent(jobs) -> None:
        tickets = [job.handle.ticket for job in jobs]

        def lengths() -> list[int | None]:  # on the engine's thread, which books what workers say
            found = [engine._shell.scheduler.sequences.get(ticket) for ticket in tickets]
            return [sequence and len(sequence.tokens) for sequence in found]

        def others_hold() -> bool:
            leases = [lease for slot in engine._shell.scheduler.slots for lease in slot.leases.values()]
            return any(lease.sequence.ticket in tickets for lease in leases)

        seen: list[list[int | None]] = []  # from when the last worker has handed its sequences back
        wait_until(lambda: sum(map(len, (slot.leases for slot in engine._shell.scheduler.slots))) == len(jobs))
        urgent = two.submit(prompt_ids=[9, 10], max_tokens=200, seed=1, priority=5)
        stream = urgent._watched()
        stream.listen(lambda: others_hold() or seen.append(lengths()))
        assert urgent.result(60)
        assert len(seen) > 20 and seen[0] == seen[-1], "somebody went on meanwhile"
        assert sum(length is not None for length in seen[0]) > 20, "they were nearly done: nothing was shown"

    before = two.stats()["sequences"]
    undisturbed = run(with_urgent=False)
    assert run(with_urgent=True) == undisturbed
    after = two.stats()["sequences"]
    assert after["paused"] - before["paused"] >= 20
    assert after["recomputed_tokens"] == before["recomputed_tokens"]


# ---- the limit of the queue ----


@pytest.fixture
def full(coordinator, monkeypatch, tmp_path):
    """A coordinator with as many unfinished jobs as it may have, these, and what keeps them so while it exists."""
    hold = tmp_path / "hold"
    hold.touch()
    monkeypatch.setenv("FAKE_HOLD_FILE", str(hold))
    limited = coordinator(fake=True, max_queue=3, ctx=400, stuck_after=3600)
    yield limited, [limited.submit(prompt_ids=[5, n], max_tokens=300) for n in range(3)], hold
    hold.unlink(missing_ok=True)


def test_submit_raises_or_waits_for_some_time_or_until_there_is_room(full):
    limited, jobs, hold = full
    with pytest.raises(QueueFullError, match="max_queue is 3"):
        limited.submit(prompt_ids=[6], wait=False)
    with pytest.raises(QueueFullError, match=r"after 0\.05 s"):
        limited.submit(prompt_ids=[6], wait=0.05)
    accepted = []
    thread = threading.Thread(target=lambda: accepted.append(limited.submit(prompt_ids=[6], max_tokens=2)))
    thread.start()
    wait_until(lambda: len(limited._roster._waiting) == 1)
    assert not accepted and limited._roster.num_unfinished == 3
    jobs[1].cancel()
    hold.unlink()
    thread.join(60)
    assert accepted[0].result(60).token_ids
    with pytest.raises(RequestError):  # a wrong field takes no place
        limited.submit(prompt_ids=[6], max_tokens=0)
    assert limited.drain(60)
    for n in range(7):
        assert limited.submit(prompt_ids=[5, n], max_tokens=1, wait=False).result(60)


def test_close_ends_the_waiting(full):
    limited, _, _ = full
    raised = []

    def submit() -> None:
        try:
            limited.submit(prompt_ids=[6])
        except EngineClosedError as error:
            raised.append(error)

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(limited._roster._waiting) == 4)
    limited.close()
    for thread in threads:
        thread.join(60)
    assert len(raised) == 4


def test_a_callback_is_never_kept_waiting(full):
    limited, jobs, hold = full
    raised = []

    def submit_more(job) -> None:
        for _ in range(5):
            try:
                limited.submit(prompt_ids=[6], max_tokens=2)
            except QueueFullError as error:
                raised.append(error)
                break
        try:
            limited.drain()
        except EngineError as error:
            raised.append(error)

    jobs[1].add_done_callback(submit_more)
    hold.unlink()
    wait(jobs, 60)
    wait_until(lambda: len(raised) == 2)
    assert isinstance(raised[0], QueueFullError) and "drain" in str(raised[1])
    assert limited.drain(60)


def test_max_queue_is_checked(coordinator):
    for wrong in (0, -1, 1.5, "3", True):
        with pytest.raises(ConfigError, match="max_queue is"):
            coordinator(fake=True, max_queue=wrong)


def test_32_threads_at_once(coordinator):
    """Through a queue that is too short for all of them; each gets its own, whole."""
    small = coordinator(ctx=400, max_queue=20)
    reference = [small.submit("a b c", max_tokens=8, seed=n).result(60).token_ids for n in range(8)]
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    start = threading.Barrier(32)

    def ask(thread: int) -> None:
        start.wait(60)
        jobs = [small.submit("a b c", max_tokens=8, seed=n, metadata={"by": f"{thread}"}) for n in range(8)]
        for n, job in enumerate(jobs):
            found[thread, n] = job.result(120).token_ids
            assert job.result().metadata == {"by": f"{thread}"}

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {(thread, n): reference[n] for thread in range(32) for n in range(8)}
    assert small.stats()["queue"]["unfinished"] == 0


# ---- retries ----


def test_retries_begin_a_job_again_that_crashed_its_worker(coordinator, sim):
    one = coordinator(fake=True, ctx=400)
    reasons = []
    for retries in (0, 2):
        job = one.submit(prompt_ids=[sim.POISON], max_tokens=3, retries=retries)
        with pytest.raises(RequestError) as caught:
            job.result(60)
        reasons.append(caught.value.code)
        assert one.stats()["workers"][0]["restarts"] == (12 if retries else 3)  # the first, two alone
    assert reasons == ["worker_crashed"] * 2


def test_the_text_of_a_retried_job_is_shown_once(coordinator, sim, monkeypatch):
    one = coordinator(fake=True, ctx=400)
    request, ids = {"max_tokens": 30, "seed": 5}, [7, 8]
    whole = one.submit(prompt_ids=ids, **request).result(60).text
    fails = [True]

    def submit(sequence, on_done):
        def done(result):
            if fails:
                fails.pop()
                result.error = RequestError("worker_crashed", "make-believe")
            on_done(result)

        return real(sequence, done)

    real = one._backend.engine.submit
    monkeypatch.setattr(one._backend.engine, "submit", submit)
    job = one.submit(prompt_ids=ids, retries=1, **request)
    assert "".join(job) == whole == job.result(60).text and not fails
