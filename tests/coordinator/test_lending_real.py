"""Cores that are lent between real processes, on a real small model: the same bytes, whoever dies meanwhile."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import Future

import psutil
import pytest

from coremill.config.request import SequenceRequest, SequenceResult

PATIENCE = 60.0


def wait_for(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happens"
        time.sleep(0.001)


def submit(run, request: SequenceRequest) -> Future[SequenceResult]:
    future: Future = Future()
    run.submit(request, future.set_result)
    return future


def outcome(result: SequenceResult):
    assert result.error is None, result.error
    return result.token_ids, result.text, result.finish_reason


def borrowed_steps(run) -> list[int]:
    return [worker["borrowed_steps"] for worker in run.stats(measure=False)["workers"]]


@pytest.fixture(scope="module")
def rows() -> list[SequenceRequest]:
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(1, 60) for _ in range(rng.randint(1, 150))) for _ in range(6)]
    return [
        SequenceRequest(str(row), prompt, 20 + 60 * row, temperature=float(row % 2), seed=row)
        for row, prompt in enumerate(prompts)
    ]


@pytest.fixture
def alone(engine, rows):
    """What becomes of the rows when nobody lends."""
    run = engine(2, fake=False, lending=False)
    assert run.wait_ready(PATIENCE)
    results = [outcome(future.result(PATIENCE)) for future in [submit(run, row) for row in rows]]
    for row in rows[-2:]:
        submit(run, row).result(PATIENCE)
    assert borrowed_steps(run) == [0, 0]
    return results


@pytest.mark.parametrize("groups", [None, [(0, 0), (0, 0), (0, 0)]], ids=["two of one core", "three of two cores"])
def test_bytes_are_the_same_with_cores_of_others(engine, rows, alone, groups):
    cores = sorted(os.sched_getaffinity(0))
    groups = groups and [tuple(cores[index % len(cores)] for index in group) for group in groups]
    run = engine(2, fake=False, groups=groups)
    assert run.wait_ready(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while not any(borrowed_steps(run)):  # who hears of a loan only after its last step has not borrowed
        assert time.monotonic() < deadline, "nobody borrows"
        assert [outcome(future.result(PATIENCE)) for future in [submit(run, row) for row in rows]] == alone
        assert outcome(submit(run, rows[-1]).result(PATIENCE)) == alone[-1]
    assert run.stats()["sequences"]["recomputed_tokens"] == 0


def stop_in_a_loan(run, row: SequenceRequest) -> tuple[Future[SequenceResult], int]:
    """Submit a lone row and stop whoever runs it, on cores of another: (its future, index of the borrower)."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        before = borrowed_steps(run)
        future = submit(run, row)
        wait_for(lambda: future.done() or borrowed_steps(run) != before)  # noqa: B023
        borrower = next((i for i, now in enumerate(borrowed_steps(run)) if now != before[i]), None)
        if borrower is None:
            continue
        worker = psutil.Process(run.stats(measure=False)["workers"][borrower]["pid"])
        worker.suspend()
        wait_for(lambda: worker.status() == psutil.STATUS_STOPPED)  # noqa: B023
        # A message that was on its way may say that the row has ended; afterwards none can.
        submit(run, SequenceRequest("x", (1,), 1)).result(PATIENCE)
        if not future.done():
            return future, borrower
        worker.resume()
    raise AssertionError("no row can be stopped while cores are lent")


@pytest.fixture
def run(engine):
    started = engine(2, fake=False, stuck_after=3600.0)
    assert started.wait_ready(PATIENCE)
    return started


def pids(run) -> list[int]:
    return [worker["pid"] for worker in run.stats(measure=False)["workers"]]


def test_the_borrower_is_killed_in_the_middle_of_a_loan(run, rows, alone):
    future, borrower = stop_in_a_loan(run, rows[-1])
    os.kill(pids(run)[borrower], signal.SIGKILL)
    result = future.result(PATIENCE)
    assert (outcome(result), result.worker) == (alone[-1], 1 - borrower)
    assert run.stats()["sequences"]["recomputed_tokens"] == 0
    wait_for(lambda: run.stats(measure=False)["workers"][borrower]["state"] == "ready")
    assert [outcome(future.result(PATIENCE)) for future in [submit(run, row) for row in rows]] == alone


def test_the_lender_is_killed_in_the_middle_of_a_loan(run, rows, alone):
    future, borrower = stop_in_a_loan(run, rows[-1])
    lender = 1 - borrower
    os.kill(pids(run)[lender], signal.SIGKILL)
    wait_for(lambda: run.stats(measure=False)["workers"][lender]["restarts"] == 1)
    assert not future.done()
    os.kill(pids(run)[borrower], signal.SIGCONT)
    result = future.result(PATIENCE)
    assert (outcome(result), result.worker) == (alone[-1], borrower)
    assert run.stats()["sequences"]["recomputed_tokens"] == 0
    wait_for(lambda: run.stats(measure=False)["workers"][lender]["state"] == "ready")
    assert [outcome(future.result(PATIENCE)) for future in [submit(run, row) for row in rows]] == alone


def test_the_lender_begins_while_its_cores_are_in_use(run, rows, alone):
    """The borrower is stopped within a step, as if it were a long one; its lender waits for nobody."""
    future, borrower = stop_in_a_loan(run, rows[-1])
    result = submit(run, rows[2]).result(PATIENCE)
    assert (outcome(result), result.worker) == (alone[2], 1 - borrower)
    assert not future.done()
    os.kill(pids(run)[borrower], signal.SIGCONT)
    assert outcome(future.result(PATIENCE)) == alone[-1]


def test_threads_of_others_cost_no_cpu_while_nothing_runs(run, rows):
    """They sleep: what the processes have used stands still."""
    future, borrower = stop_in_a_loan(run, rows[-1])
    os.kill(pids(run)[borrower], signal.SIGCONT)
    future.result(PATIENCE)
    worker = psutil.Process(pids(run)[borrower])

    def used() -> float:
        return sum(worker.cpu_times()[:2])

    def stands_still() -> bool:
        before = used()
        time.sleep(0.5)
        return used() == before

    wait_for(stands_still)
