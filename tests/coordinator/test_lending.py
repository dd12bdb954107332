"""Who lends cores to whom, by lists: events in, instructions out."""

from __future__ import annotations

import zlib

import pytest

from coremill.config.messages import Begin, Borrow, Ready, Release, Released, Stepped
from coremill.config.request import SequenceRequest
from coremill.config.topology import CoreGroup
from coremill.coordinator.events import (
    Cancelled,
    Finish,
    FromWorker,
    Paused,
    RetireWorker,
    Send,
    StartWorker,
    Submitted,
    WorkerDied,
    Workers,
    WorkerStopped,
)
from coremill.coordinator.limits import Limits
from coremill.coordinator.scheduler import Scheduler

ONE_NODE = (CoreGroup((0,)), CoreGroup((1,)), CoreGroup((2,)), CoreGroup((3,)))


def make(groups=ONE_NODE, num_workers=2, max_active=2, num_blocks=64, up=True, **more) -> Scheduler:
    groups = groups[:num_workers]
    scheduler = Scheduler(Limits(len(groups), max_active, num_blocks, 1000, groups=groups, **more))
    scheduler.start()
    if up:
        happen(scheduler, *(FromWorker(index, Ready("scalar", 0, 0.0)) for index in range(len(groups))))
    return scheduler


def happen(scheduler: Scheduler, *events):
    sent = scheduler.advance(events, 0.0)
    scheduler.check()
    return sent


def submit(scheduler: Scheduler, ticket: int, max_tokens: int = 100, num_prompt: int = 40, **more):
    """Prompts of different tickets have nothing in common."""
    first = 1000 + zlib.crc32(b"%d" % ticket) % 1_000_000
    prompt = tuple(range(first, first + num_prompt))
    return happen(scheduler, Submitted(ticket, SequenceRequest(str(ticket), prompt, max_tokens, **more)))


def finish(scheduler: Scheduler, worker: int, lease: int):
    return happen(scheduler, FromWorker(worker, Stepped((), ((lease, 5, b""),), ((lease, "length"),), 1, 1, 0.0)))


def told(sent) -> list[tuple[int, tuple[int, ...]]]:
    """(worker, cores it may borrow from now on)."""
    return [(x.worker, x.message.cores) for x in sent if isinstance(x, Send) and isinstance(x.message, Borrow)]


def test_an_idle_worker_lends_to_the_one_that_runs_until_it_has_something_itself():
    scheduler = make()
    begin, borrow = submit(scheduler, 1)
    assert isinstance(begin.message, Begin) and borrow == Send(begin.worker, Borrow((1,)))
    assert told(finish(scheduler, 0, 1)) == [(0, ())]  # nobody runs any more
    submit(scheduler, 2)
    begin, borrow = submit(scheduler, 3)  # the lender begins at once
    assert (begin.worker, begin.message.lease, borrow) == (1, 3, Send(0, Borrow(())))
    assert told(finish(scheduler, 0, 2)) == [(1, (0,))]
    assert told(finish(scheduler, 1, 3)) == [(1, ())]


def test_nobody_lends_while_all_run_while_one_starts_or_when_told_not_to():
    scheduler = make(up=False)
    happen(scheduler, FromWorker(0, Ready("scalar", 0, 0.0)))
    assert told(submit(scheduler, 1)) == []
    assert told(happen(scheduler, FromWorker(1, Ready("scalar", 0, 0.0)))) == [(0, (1,))]
    alone = Scheduler(Limits(2, 2, 64, 1000))
    alone.advance([FromWorker(index, Ready("scalar", 0, 0.0)) for index in range(2)], 0.0)
    assert told(submit(alone, 1)) == []


def test_a_step_changes_nothing():
    scheduler = make()
    submit(scheduler, 1)
    for computed in (16, 32):
        assert happen(scheduler, FromWorker(0, Stepped(((1, computed),), (), (), 16, 1, 0.0))) == []


def test_whoever_waits_for_a_prefix_of_another_lends_meanwhile():
    scheduler = make(max_active=1)
    prompt = tuple(range(1, 101))
    happen(scheduler, Submitted(1, SequenceRequest("first", (*prompt, 7), 10)))
    sent = happen(scheduler, Submitted(2, SequenceRequest("second", (*prompt, 8), 10)))
    assert sent == [] and list(scheduler.parked) == [2]
    assert scheduler.loans.borrower_of == {1: 0}
    begin, borrow = happen(scheduler, FromWorker(0, Stepped(((1, 100),), (), (), 100, 1, 0.0)))
    assert (begin.worker, begin.message.computed, borrow) == (1, 100, Send(0, Borrow(())))


def test_lenders_are_spread_evenly_those_left_over_go_where_most_is_to_do():
    scheduler = make(num_workers=4)
    assert told(submit(scheduler, 1, max_tokens=100)) == [(0, (1, 2, 3))]  # nearest first
    assert told(submit(scheduler, 2, max_tokens=500)) == [(0, (2,)), (1, (3,))]
    assert told(submit(scheduler, 3)) == [(0, ())]  # worker 2
    assert scheduler.loans.borrower_of == {3: 1}
    assert told(finish(scheduler, 1, 2)) == [(0, (1,)), (1, ()), (2, (3,))]
    assert told(finish(scheduler, 0, 1)) == [(0, ()), (2, (1, 3, 0))]


def test_the_same_numa_node_comes_first():
    groups = tuple(CoreGroup((2 * index, 2 * index + 1), numa=index // 2) for index in range(4))
    scheduler = make(groups, num_workers=4)
    assert told(submit(scheduler, 1)) == [(0, (2, 3, 4, 5, 6, 7))]
    happen(scheduler, WorkerDied(1, "killed by SIGKILL", crashed=False))
    begin = submit(scheduler, 2)
    assert [x.worker for x in begin if isinstance(x.message, Begin)] == [2]
    assert told(begin) == [(0, (6, 7))]  # no reason to change
    assert told(happen(scheduler, FromWorker(1, Ready("scalar", 0, 0.0)))) == [(2, (2, 3))]  # fewest, not nearest
    happen(scheduler, WorkerDied(1, "killed by SIGKILL", crashed=False))
    happen(scheduler, WorkerDied(3, "killed by SIGKILL", crashed=False))
    both = [FromWorker(index, Ready("scalar", 0, 0.0)) for index in (3, 1)]
    assert told(happen(scheduler, *both)) == [(0, (2, 3)), (2, (6, 7))]


@pytest.mark.parametrize("crashed", [False, True])
def test_the_lender_dies(crashed):
    scheduler = make()
    submit(scheduler, 1)
    sent = happen(scheduler, WorkerDied(1, "x", crashed))
    assert sent == [StartWorker(1), Send(0, Borrow(()))]
    assert all(sequence.charged_at is None for sequence in scheduler.sequences.values())
    assert told(happen(scheduler, FromWorker(1, Ready("scalar", 0, 0.0)))) == [(0, (1,))]


def test_the_lender_is_retired():
    scheduler = make()
    submit(scheduler, 1)
    happen(scheduler, WorkerDied(1, "x", True))
    sent = happen(scheduler, WorkerDied(1, "no", True, hopeless=True))
    assert sent == [RetireWorker(1, "no")] and scheduler.loans.borrower_of == {}


def test_the_borrower_dies():
    scheduler = make()
    submit(scheduler, 1)
    sent = happen(scheduler, WorkerDied(0, "killed by SIGKILL", crashed=False))
    # Its sequence goes on with the lender; nothing is said to the dead.
    assert [type(x) for x in sent] == [StartWorker, Send] and sent[1].worker == 1
    assert isinstance(sent[1].message, Begin)
    assert told(happen(scheduler, FromWorker(0, Ready("scalar", 0, 0.0)))) == [(1, (0,))]


def test_the_lender_leaves_and_comes_back():
    scheduler = make()
    submit(scheduler, 1)
    assert told(happen(scheduler, Workers(1))) == [(0, ())]
    assert happen(scheduler, WorkerDied(1, "exit code 0", crashed=False)) == [WorkerStopped(1)]
    assert happen(scheduler, Workers(2)) == [StartWorker(1)]
    assert told(happen(scheduler, FromWorker(1, Ready("scalar", 0, 0.0)))) == [(0, (1,))]


def test_the_borrower_leaves():
    scheduler = make()
    submit(scheduler, 1)
    submit(scheduler, 2)
    assert told(finish(scheduler, 0, 1)) == [(1, (0,))]
    sent = happen(scheduler, Workers(1))
    assert sent == [Send(1, Release(2)), Send(1, Borrow(()))]
    begin, _ = happen(scheduler, FromWorker(1, Released(2, 16)))
    assert begin.worker == 0 and scheduler.loans.borrower_of == {}


def test_no_loan_begins_while_a_sequence_is_on_its_way_to_the_one_that_idles():
    scheduler = make(num_workers=2, max_active=4)
    for ticket in range(1, 5):
        submit(scheduler, ticket)
    finish(scheduler, 1, 2)
    sent = finish(scheduler, 1, 4)  # worker 0 has two, worker 1 none
    assert [type(x.message) for x in sent if isinstance(x, Send)] == [Release]
    sent = happen(scheduler, FromWorker(0, Released(sent[-1].message.lease, 8)))
    assert [x.worker for x in sent] == [1] and scheduler.loans.borrower_of == {}


def test_an_urgent_request_takes_the_lender():
    scheduler = make(max_active=1)
    submit(scheduler, 1)
    sent = submit(scheduler, 2, priority=1)
    assert [x.worker for x in sent if isinstance(x.message, Begin)] == [1]
    assert told(sent) == [(0, ())]
    assert Send(0, Release(1)) in sent
    assert told(happen(scheduler, FromWorker(0, Released(1, 8)))) == [(1, (0,))]  # who rests for it lends to it
    sent = finish(scheduler, 1, 2)
    assert [x.worker for x in sent if isinstance(x, Send) and isinstance(x.message, Begin)] == [0]
    assert told(sent) == [(0, (1,)), (1, ())]


def test_pausing_and_cancelling_end_a_loan():
    scheduler = make()
    submit(scheduler, 1)
    happen(scheduler, Paused(True))
    assert told(happen(scheduler, FromWorker(0, Released(1, 8)))) == [(0, ())]
    assert told(happen(scheduler, Paused(False))) == [(0, (1,))]
    assert [type(x) for x in happen(scheduler, Cancelled(1))] == [Send, Finish]
    assert told(happen(scheduler, FromWorker(0, Released(2, 16)))) == [(0, ())]


def test_a_step_gets_no_more_threads_than_can_help():
    groups = tuple(CoreGroup(tuple(range(16 * index, 16 * index + 16))) for index in range(8))
    scheduler = make(groups, num_workers=8, num_blocks=999)
    ((_, cores),) = told(submit(scheduler, 1))
    assert cores == tuple(range(16, 16 + 63))
