"""Sharing by lists: what the scheduler tells workers when sequences have a beginning in common."""

from __future__ import annotations

import random

from coremill.config.messages import Begin, Cancel, Ready, Release, Released, Stepped
from coremill.config.request import SequenceRequest
from coremill.coordinator.events import (
    Cancelled,
    FromWorker,
    Send,
    StartWorker,
    Submitted,
    WorkerDied,
    Workers,
    WorkerStopped,
)
from coremill.coordinator.jobs import Sequence, WaitingLine
from coremill.coordinator.limits import Limits
from coremill.coordinator.prefix import Node, common_length
from coremill.coordinator.scheduler import Scheduler

READY = Ready("scalar", 0, 0.0)
SYSTEM = tuple(range(100, 180))  # two blocks and a half


def make(num_workers=2, max_active=4, num_blocks=64, **more) -> Scheduler:
    scheduler = Scheduler(Limits(num_workers, max_active, num_blocks, 800, **more))
    scheduler.start()
    scheduler.advance([FromWorker(index, READY) for index in range(num_workers)], 0.0)
    return scheduler


def submit(scheduler: Scheduler, ticket: int, prompt: tuple[int, ...], max_tokens: int = 20, **more):
    request = SequenceRequest(str(ticket), prompt, max_tokens, **more)
    return begins(scheduler.advance([Submitted(ticket, request)], 0.0))


def begins(instructions) -> list[tuple[int, Begin]]:
    return [(x.worker, x.message) for x in instructions if isinstance(x, Send) and isinstance(x.message, Begin)]


def sends(instructions) -> list[Send]:
    return [x for x in instructions if isinstance(x, Send)]


def stepped(scheduler, worker, prefilled=(), tokens=(), finished=()):
    message = Stepped(tuple(prefilled), tuple(tokens), tuple(finished), 1, 1, 0.01)
    sent = scheduler.advance([FromWorker(worker, message)], 0.0)
    scheduler.check()
    return sent


def finish(scheduler, worker, lease) -> list[tuple[int, Begin]]:
    return begins(stepped(scheduler, worker, tokens=[(lease, 7, b"")], finished=[(lease, "stop")]))


def test_the_second_waits_for_what_the_first_computes_and_others_go_ahead():
    scheduler = make()
    ((_, first),) = submit(scheduler, 1, (*SYSTEM, 1, 2, 3))
    assert first.computed == 0 and first.copy is None
    assert submit(scheduler, 2, (*SYSTEM, 9, 9, 9)) == []
    ((_, other),) = submit(scheduler, 3, (5, 6, 7))
    assert other.computed == 0
    assert begins(stepped(scheduler, 0, prefilled=[(first.lease, 64)])) == []  # the last 16 are worth it too
    ((worker, second),) = begins(stepped(scheduler, 0, tokens=[(first.lease, 7, b"")]))
    assert worker == 0 or len(scheduler.slots[1].leases) == 2
    assert second.computed == 80 and second.blocks[:2] == first.blocks[:2]
    assert second.copy == (first.blocks[2], second.blocks[2], 16)
    assert not set(second.blocks[2:]) & set(first.blocks)
    assert scheduler.sequences[2].cached == 80


def test_the_last_token_of_a_prompt_is_computed_and_a_shared_block_is_never_written():
    scheduler = make()
    prompt = tuple(range(64))
    ((worker, first),) = submit(scheduler, 1, prompt)
    finish(scheduler, worker, first.lease)
    ((_, again),) = submit(scheduler, 2, prompt)
    assert again.computed == 63 and again.blocks[0] == first.blocks[0]
    assert again.copy == (first.blocks[1], again.blocks[1], 31)
    scheduler.check()


def test_a_conversation_goes_on_where_it_was():
    scheduler = make()
    ((worker, first),) = submit(scheduler, 1, tuple(range(40)), max_tokens=30)
    for _ in range(29):
        stepped(scheduler, worker, tokens=[(first.lease, 900, b"")])
    finish(scheduler, worker, first.lease)
    history = (*range(40), *[900] * 29, 7)  # 69 of its 70 tokens have been computed
    ((_, second),) = submit(scheduler, 2, (*history, 55, 56, 57))
    assert second.computed == 69 and second.blocks[:2] == first.blocks[:2]
    assert second.copy == (first.blocks[2], second.blocks[2], 5)


def test_a_few_common_tokens_are_neither_waited_for_nor_copied():
    scheduler = make()
    submit(scheduler, 1, (1, 2, 3, *range(100, 140)))
    ((_, second),) = submit(scheduler, 2, (1, 2, 3, *range(200, 240)))
    assert second.computed == 0 and second.copy is None


def test_without_the_prefix_cache_everybody_computes_and_nothing_stays():
    scheduler = make(prefix_cache=False)
    ((worker, first),) = submit(scheduler, 1, SYSTEM)
    ((_, second),) = submit(scheduler, 2, SYSTEM)
    assert second.computed == 0 and not set(first.blocks) & set(second.blocks)
    finish(scheduler, worker, first.lease)
    assert scheduler.count_blocks()["cached"] == 0
    scheduler.check()


def test_who_waits_goes_on_by_itself_when_the_other_is_cancelled_or_dies():
    for end in ("cancel", "death"):
        scheduler = make(num_workers=1)
        ((_, first),) = submit(scheduler, 1, (*SYSTEM, 1))
        assert submit(scheduler, 2, (*SYSTEM, 2)) == []
        stepped(scheduler, 0, prefilled=[(first.lease, 40)])
        if end == "cancel":
            sent = scheduler.advance([Cancelled(1)], 0.0)
            assert Send(0, Cancel(first.lease)) in sent
            ((_, second),) = begins(sent)
            assert second.computed == 32  # the block that was full
        else:
            scheduler.advance([WorkerDied(0, "killed by SIGKILL", crashed=False)], 0.0)
            ((_, again),) = begins(scheduler.advance([FromWorker(0, READY)], 0.0))
            assert again.computed == 40 and again.tokens[-1] == 1 and again.copy is None
            assert 2 in scheduler.parked
        scheduler.check()


def test_the_source_of_a_copy_stays_until_the_copy_is_made():
    scheduler = make(num_workers=1, num_blocks=8)
    ((_, first),) = submit(scheduler, 1, tuple(range(40)), max_tokens=5)
    finish(scheduler, 0, first.lease)
    source = first.blocks[1]
    ((_, second),) = submit(scheduler, 2, (*range(40), 77, 78), max_tokens=5)
    assert second.copy == (source, second.blocks[1], 8)
    ((_, third),) = submit(scheduler, 3, tuple(range(300, 420)), max_tokens=5)  # all that is left
    assert source not in third.blocks
    # The worker dies before it says anything: whether the copy was made is unknown, so it is asked for again.
    scheduler.advance([WorkerDied(0, "killed by SIGKILL", crashed=False)], 0.0)
    scheduler.check()
    again = [begin for _, begin in begins(scheduler.advance([FromWorker(0, READY)], 0.0)) if begin.tokens[-1] == 78]
    assert again[0].copy == second.copy and again[0].computed == 40
    stepped(scheduler, 0, tokens=[(again[0].lease, 5, b"")])
    assert scheduler.tables.pool.num_pinned == 0


def test_two_prefixes_stay_though_many_rows_pass_by():
    scheduler = make(num_workers=1, max_active=2, num_blocks=40)
    rng = random.Random(1)
    prefixes = [tuple(rng.randrange(1000) for _ in range(140)) for _ in range(2)]
    for ticket in range(200):
        prompt = prefixes[ticket % 2] + tuple(rng.randrange(1000, 2000) for _ in range(rng.randint(20, 60)))
        ((worker, begin),) = submit(scheduler, ticket, prompt)
        assert begin.computed == (140 if ticket > 1 else 0)
        finish(scheduler, worker, begin.lease)
    assert scheduler.tables.index.num_evicted > 100


def test_moving_to_an_idle_worker_computes_nothing_again():
    scheduler = make(num_workers=2, max_active=4)
    leases = {}
    for ticket in range(1, 5):
        ((worker, begin),) = submit(scheduler, ticket, tuple(range(ticket * 100, ticket * 100 + 40)), max_tokens=60)
        leases[begin.lease] = (worker, begin)
        stepped(scheduler, worker, tokens=[(begin.lease, 7, b"")])
    mine = [lease for lease, (worker, _) in leases.items() if worker == 0]
    assert sends(stepped(scheduler, 0, tokens=[(mine[0], 7, b"")], finished=[(mine[0], "stop")])) == []  # 1 and 2
    (release,) = sends(stepped(scheduler, 0, tokens=[(mine[1], 7, b"")], finished=[(mine[1], "stop")]))
    worker, lease = release.worker, release.message.lease
    assert isinstance(release.message, Release)
    assert worker == 1
    ((worker, begin),) = begins(scheduler.advance([FromWorker(1, Released(lease, 40))], 0.0))
    assert (worker, begin.computed, begin.blocks) == (0, 40, leases[lease][1].blocks)
    assert scheduler.counts["moved"] == 1 and scheduler.counts["recomputed_tokens"] == 0
    scheduler.check()


def test_an_urgent_sequence_has_the_workers_for_itself():
    scheduler = make(num_workers=1, max_active=2)
    ((_, old),) = submit(scheduler, 1, tuple(range(100, 140)))
    ((_, young),) = submit(scheduler, 2, tuple(range(200, 240)))
    sent = scheduler.advance([Submitted(3, SequenceRequest("3", tuple(range(300, 340)), 5, priority=1))], 0.0)
    assert sent == [Send(0, Release(old.lease)), Send(0, Release(young.lease))]
    ((_, urgent),) = begins(scheduler.advance([FromWorker(0, Released(young.lease, 40))], 0.0))
    assert urgent.tokens[0] == 300 and scheduler.counts["paused"] == 2
    assert begins(scheduler.advance([FromWorker(0, Released(old.lease, 40))], 0.0)) == []  # there would be room
    again = [begin for _, begin in finish(scheduler, 0, urgent.lease)]
    assert [begin.tokens[0] for begin in again] == [100, 200]
    assert [begin.blocks[:2] for begin in again] == [old.blocks[:2], young.blocks[:2]]
    assert scheduler.counts["recomputed_tokens"] == 0


def test_draining_a_worker_and_taking_it_back():
    scheduler = make(num_workers=2)
    ((worker, begin),) = submit(scheduler, 1, tuple(range(40)))
    ((other, second),) = submit(scheduler, 2, tuple(range(50, 90)))
    assert {worker, other} == {0, 1}
    moving = begin if worker == 1 else second
    sent = scheduler.advance([Workers(1)], 0.0)
    assert sent == [Send(1, Release(moving.lease))]
    sent = scheduler.advance([FromWorker(1, Released(moving.lease, 30))], 0.0)
    assert [type(x.message).__name__ for x in sent] == ["Begin", "Stop"]
    assert (sent[0].worker, sent[0].message.computed, sent[1].worker) == (0, 30, 1)
    (stopped,) = scheduler.advance([WorkerDied(1, "exit code 0", crashed=False)], 0.0)
    assert (type(stopped).__name__, scheduler.slots[1].state) == ("WorkerStopped", "stopped")
    (start,) = scheduler.advance([Workers(2)], 0.0)
    assert type(start).__name__ == "StartWorker"
    sent = scheduler.advance([FromWorker(1, READY)], 0.0)
    assert [type(x.message).__name__ for x in sent] == ["Release"]  # one for each again
    scheduler.check()


def test_a_worker_wanted_again_while_it_leaves_is_started_again():
    scheduler = make(num_workers=2)
    assert [type(x.message).__name__ for x in scheduler.advance([Workers(1)], 0.0)] == ["Stop"]
    assert scheduler.advance([Workers(2)], 0.0) == []
    ((worker, _),) = submit(scheduler, 1, tuple(range(40)))
    assert worker == 0  # nothing for one that leaves
    assert scheduler.advance([WorkerDied(1, "exit code 0", crashed=False)], 0.0) == [StartWorker(1)]
    scheduler.advance([FromWorker(1, READY)], 0.0)
    ((worker, _),) = submit(scheduler, 2, tuple(range(50, 90)))
    assert worker == 1
    assert scheduler.slots[1].fruitless_deaths == 0
    scheduler.check()


def test_a_worker_wanted_and_not_wanted_while_it_leaves_stays_away():
    scheduler = make(num_workers=2)
    for count in (1, 2, 1):
        scheduler.advance([Workers(count)], 0.0)
    assert scheduler.advance([WorkerDied(1, "exit code 0", crashed=False)], 0.0) == [WorkerStopped(1)]
    assert scheduler.slots[1].state == "stopped"


def test_the_longest_common_beginning_is_next_in_order():
    rng = random.Random(3)
    node = Node(None, (), -1)
    keys = {tuple(rng.randrange(3) for _ in range(rng.randint(1, 12))) for _ in range(200)}
    for key in keys:
        node.children[key] = Node(node, key, 0)
    node.keys = sorted(keys)
    for _ in range(500):
        wanted = tuple(rng.randrange(3) for _ in range(rng.randint(1, 14)))
        assert node.nearest(wanted)[1] == max(common_length(key, wanted) for key in keys)


A, B = tuple(range(1000, 1064)), tuple(range(2000, 2064))  # two blocks each


def in_turn(scheduler: Scheduler, *prompts: tuple[int, ...], longest: int = 200) -> None:
    """One after another on the only slot, in this order: those with more work left are served first."""
    for ticket, prompt in enumerate(prompts):
        request = SequenceRequest(str(ticket), prompt, longest - 20 * ticket - len(prompt))
        scheduler.advance([Submitted(ticket, request)], 0.0)


def finish_next(scheduler: Scheduler) -> Begin | None:
    """The only one that runs ends; who begins then."""
    (lease,) = scheduler.slots[0].leases
    return next((begin for _, begin in finish(scheduler, 0, lease)), None)


def test_what_rows_to_come_begin_with_outlives_what_nobody_wants():
    """Seven blocks. The third row needs five, and the oldest prefix is the one that the fourth begins with."""
    scheduler = make(num_workers=1, max_active=1, num_blocks=7)
    in_turn(scheduler, (*A, 1), (*B, 1), tuple(range(3000, 3125)), (*A, 2))
    second, third = finish_next(scheduler), finish_next(scheduler)
    assert (second.computed, third.computed) == (0, 0)
    assert scheduler.tables.index.num_evicted == 2  # the two of the second row
    fourth = finish_next(scheduler)
    assert fourth.computed == 64
    assert finish_next(scheduler) is None
    scheduler.check()


def test_what_nobody_wants_any_more_goes_by_age_again():
    scheduler = make(num_workers=1, max_active=1, num_blocks=7)
    in_turn(scheduler, (*A, 1), (*B, 1), tuple(range(3000, 3125)), (*A, 2))
    finish_next(scheduler), finish_next(scheduler)  # now it has been set aside
    scheduler.advance([Cancelled(3)], 0.0)
    submit(scheduler, 5, tuple(range(4000, 4125)), 30)
    assert finish_next(scheduler).computed == 0
    assert not scheduler.tables.match((*A, 2)).nodes
    scheduler.check()


def test_everything_is_wanted_and_still_somebody_must_go():
    """Five blocks: the second row needs one of the two that the third begins with, its last."""
    scheduler = make(num_workers=1, max_active=1, num_blocks=5)
    in_turn(scheduler, (*A, 1), (*B, 1), (*A, 2), longest=160)
    assert finish_next(scheduler).computed == 0
    assert finish_next(scheduler).computed == 32
    assert finish_next(scheduler) is None
    scheduler.check()


def test_a_line_knows_the_beginnings_of_its_fresh_ones():
    line = WaitingLine()
    for ticket, prompt in enumerate([(1, 2, 3), (1, 2), (5,), (1, 2, 3, 4)], 1):
        line.push(Sequence(ticket, SequenceRequest(str(ticket), prompt, 9), list(prompt)))
    answers = {
        tokens: line.has_beginning(tokens) for tokens in [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (5,), (6,), (1, 9)]
    }
    assert answers == {
        (1,): True, (1, 2): True, (1, 2, 3): True, (1, 2, 3, 4): False, (5,): False, (6,): False, (1, 9): False
    }  # fmt: skip
