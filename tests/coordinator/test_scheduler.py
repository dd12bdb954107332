"""The scheduler by lists: events in, instructions out."""

from __future__ import annotations

import zlib

import pytest

from coremill.config.messages import Begin, Cancel, Extend, Failed, Ready, Release, Released, Stepped, Stop
from coremill.config.request import SequenceRequest
from coremill.coordinator.events import (
    Cancelled,
    Closing,
    Finish,
    FromWorker,
    GiveUp,
    Paused,
    RetireWorker,
    Send,
    StartWorker,
    Submitted,
    WorkerDied,
)
from coremill.coordinator.limits import Limits
from coremill.coordinator.scheduler import Scheduler, SchedulerError

READY = Ready("scalar", 0, 0.0)


def make(num_workers=1, max_active=2, num_blocks=16, **more) -> Scheduler:
    scheduler = Scheduler(Limits(num_workers, max_active, num_blocks, more.pop("max_length", 400), **more))
    assert scheduler.start() == [StartWorker(index) for index in range(num_workers)]
    return scheduler


def request(key: str = "a", num_prompt: int = 40, max_tokens: int = 100, **more) -> SequenceRequest:
    """Prompts of different keys have nothing in common."""
    first = 1 if key == "a" else 1000 + zlib.crc32(key.encode()) % 1_000_000
    return SequenceRequest(key, tuple(range(first, first + num_prompt)), max_tokens, **more)


def ready(scheduler: Scheduler, *indices: int):
    return scheduler.advance([FromWorker(index, READY) for index in indices], 0.0)


def stepped(index: int = 0, prefilled=(), tokens=(), finished=()) -> FromWorker:
    return FromWorker(index, Stepped(tuple(prefilled), tuple(tokens), tuple(finished), 1, 1, 0.01))


def begun(instructions) -> list[tuple[int, int, int]]:
    """(worker, lease, number of tokens) of every Begin."""
    return [
        (x.worker, x.message.lease, len(x.message.tokens))
        for x in instructions
        if isinstance(x, Send) and isinstance(x.message, Begin)
    ]


def finishes(instructions):
    return [(x.ticket, x.result) for x in instructions if isinstance(x, Finish)]


def test_nothing_is_sent_before_a_worker_is_ready():
    scheduler = make()
    assert scheduler.advance([Submitted(1, request())], 0.0) == []
    (send,) = ready(scheduler, 0)
    assert send == Send(
        0,
        Begin(
            lease=1,
            tokens=tuple(range(1, 41)),
            num_prompt=40,
            computed=0,
            alone_until=None,
            blocks=(0, 1, 2),  # 40 tokens and 32 ahead
            copy=None,
            max_tokens=100,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=0,
            stop=(),
            stop_ids=(),
        ),
    )


def test_a_sequence_from_submission_to_result_with_times():
    scheduler = make()
    ready(scheduler, 0)
    scheduler.advance([Submitted(1, request("row", 3, 10))], 10.0)
    assert scheduler.advance([stepped(prefilled=[(1, 2)])], 12.0) == []
    assert scheduler.advance([stepped(tokens=[(1, 7, b"he")])], 13.0) == []
    ((ticket, result),) = finishes(scheduler.advance([stepped(tokens=[(1, 8, b"llo")], finished=[(1, "stop")])], 17.0))
    assert (ticket, result.key, result.token_ids, result.text) == (1, "row", [7, 8], "hello")
    assert (result.finish_reason, result.error, result.worker) == ("stop", None, 0)
    assert (result.queued_s, result.prefill_s, result.decode_s) == (0.0, 3.0, 4.0)
    scheduler.check()
    assert scheduler.tables.num_available == 16


def test_tables_grow_before_the_worker_needs_it():
    scheduler = make()
    ready(scheduler, 0)
    scheduler.advance([Submitted(1, request(num_prompt=31, max_tokens=80))], 0.0)  # blocks 0, 1: up to 64 tokens
    sent = []
    for step in range(70):
        sent += [(step, x.message.blocks) for x in scheduler.advance([stepped(tokens=[(1, 9, b"")])], 0.0)]
    # After token t there are 31 + t tokens; a block more is sent when those and 32 ahead need it, never beyond 110.
    assert sent == [(1, (2,)), (33, (3,))]


def test_work_is_spread_evenly_also_over_workers_that_still_start():
    scheduler = make(num_workers=2, max_active=8, num_blocks=64)
    scheduler.advance([Submitted(ticket, request(str(ticket), 8, 8)) for ticket in range(1, 7)], 0.0)
    assert [worker for worker, _, _ in begun(ready(scheduler, 0))] == [0, 0, 0]
    assert [worker for worker, _, _ in begun(ready(scheduler, 1))] == [1, 1, 1]


def test_every_slot_is_filled_when_there_is_plenty():
    scheduler = make(num_workers=2, max_active=3, num_blocks=64)
    ready(scheduler, 0, 1)
    sent = scheduler.advance([Submitted(ticket, request(str(ticket), 8, 8)) for ticket in range(1, 11)], 0.0)
    assert sorted(worker for worker, _, _ in begun(sent)) == [0, 0, 0, 1, 1, 1]
    assert begun(scheduler.advance([stepped(1, tokens=[(2, 5, b"")], finished=[(2, "stop")])], 0.0)) == [(1, 7, 8)]


def test_longest_first_but_urgent_ones_before():
    scheduler = make(max_active=1, num_blocks=64)
    rows = [request("short", 4, 4), request("long", 90, 90), request("urgent", 5, 5, priority=1)]
    scheduler.advance([Submitted(ticket, row) for ticket, row in enumerate(rows, 1)], 0.0)
    order = begun(ready(scheduler, 0))
    for lease in (1, 2):
        order += begun(scheduler.advance([stepped(tokens=[(lease, 5, b"")], finished=[(lease, "stop")])], 0.0))
    assert [length for _, _, length in order] == [5, 90, 4]


def test_a_short_arena_pauses_the_youngest_and_takes_of_its_blocks_only_what_it_must():
    scheduler = make(num_blocks=5, max_length=200)
    ready(scheduler, 0)
    # Each begins with two blocks of 5, and both would like four in the end.
    scheduler.advance([Submitted(1, request("old", 20, 80)), Submitted(2, request("young", 20, 80))], 0.0)
    instructions = []
    while not any(isinstance(x.message, Release) for x in instructions):
        instructions += scheduler.advance([stepped(tokens=[(1, 5, b"x"), (2, 6, b"y")])], 0.0)
        scheduler.check()
    assert instructions[-1] == Send(0, Release(2))
    assert scheduler.advance([stepped(tokens=[(1, 5, b"x"), (2, 6, b"y")])], 0.0) == []
    young = scheduler.sequences[2]
    computed = len(young.tokens) - 1
    # It waits now, with its two blocks, until the old one cannot go on without one of them.
    assert scheduler.advance([FromWorker(0, Released(2, computed))], 0.0) == []
    assert (len(young.table.blocks), young.table.done, scheduler.counts["paused"]) == (2, computed, 1)
    sent = [x for _ in range(34) for x in scheduler.advance([stepped(tokens=[(1, 5, b"x")])], 0.0)]
    assert [type(x.message) for x in sent] == [Extend]
    assert (len(young.table.blocks), young.table.done, scheduler.counts["dropped_blocks"]) == (1, 32, 1)
    (begin,) = (
        x.message
        for x in scheduler.advance([stepped(tokens=[(1, 5, b"x")], finished=[(1, "stop")])], 0.0)
        if isinstance(x, Send)
    )
    assert (begin.computed, scheduler.counts["recomputed_tokens"]) == (32, computed - 32)
    assert list(begin.tokens) == young.tokens and set(begin.tokens[20:]) == {6}
    scheduler.check()


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        ({"num_prompt": 0}, "empty_prompt", "prompt"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"num_prompt": 301}, "context_length_exceeded", "max_tokens"),
        ({"num_prompt": 65, "max_tokens": 65}, "arena_too_small", "max_tokens"),
        ({"temperature": float("nan")}, "invalid_value", "temperature"),
        ({"top_p": 1.5}, "invalid_value", "top_p"),
        ({"seed": -1}, "invalid_value", "seed"),
        ({"stop": (b"",)}, "invalid_value", "stop"),
        ({"num_prompt": 100, "max_tokens": 1}, "invalid_value", "prompt"),
    ],
)
def test_what_can_never_run_is_refused_at_once(bad, code, param):
    scheduler = make(num_blocks=4, vocab_size=350 if bad.get("max_tokens") != 1 else 50)
    ready(scheduler, 0)
    ((_, result),) = finishes(scheduler.advance([Submitted(1, request(**bad))], 0.0))
    assert (result.error.code, result.error.param) == (code, param)
    assert result.finish_reason is None
    scheduler.check()


def test_a_request_that_just_fits_the_arena_runs():
    scheduler = make(num_blocks=4)
    ready(scheduler, 0)
    sent = scheduler.advance([Submitted(1, request(num_prompt=65, max_tokens=64))], 0.0)
    assert len(sent[0].message.blocks) == 4


def test_cancel_waiting_and_running():
    scheduler = make(max_active=1)
    ready(scheduler, 0)
    scheduler.advance([Submitted(1, request("runs")), Submitted(2, request("waits"))], 0.0)
    ((ticket, result),) = finishes(scheduler.advance([Cancelled(2)], 0.0))
    assert (ticket, result.error.code) == (2, "cancelled")
    cancel, finish = scheduler.advance([Cancelled(1)], 0.0)
    assert cancel == Send(0, Cancel(1)) and finish.result.error.code == "cancelled"
    assert scheduler.tables.num_available < 16  # the worker may still write to them
    # It was in the middle of a step, and finished it before it heard.
    assert scheduler.advance([stepped(tokens=[(1, 5, b"")])], 0.0) == []
    assert scheduler.advance([FromWorker(0, Released(1, 40)), Cancelled(1), Cancelled(99)], 0.0) == []
    assert scheduler.tables.num_available == 16
    scheduler.check()


def test_pausing_takes_everything_back_and_resuming_goes_on_where_it_was():
    scheduler = make(num_workers=2)
    ready(scheduler, 0, 1)
    scheduler.advance([Submitted(1, request("a")), Submitted(2, request("b"))], 1.0)
    scheduler.advance([stepped(0, tokens=[(1, 7, b"x")])], 1.5)
    assert scheduler.advance([Paused(True)], 2.0) == [Send(0, Release(1)), Send(1, Release(2))]
    assert scheduler.advance([Paused(True)], 2.1) == []
    scheduler.advance([FromWorker(0, Released(1, 40)), FromWorker(1, Released(2, 16))], 3.0)
    assert scheduler.advance([Submitted(3, request("c"))], 4.0) == []
    begins = [x.message for x in scheduler.advance([Paused(False)], 5.0) if isinstance(x, Send)]
    assert [(x.tokens[0] == 1, len(x.tokens), x.computed) for x in begins[:2]] == [(True, 41, 40), (False, 40, 16)]
    assert len(begins) == 3 and scheduler.counts["recomputed_tokens"] == 0
    scheduler.check()


def test_a_failing_sequence_is_its_own_affair():
    scheduler = make()
    ready(scheduler, 0)
    scheduler.advance([Submitted(1, request("bad")), Submitted(2, request("good"))], 0.0)
    ((ticket, result),) = finishes(scheduler.advance([FromWorker(0, Failed(1, "nonfinite_logits", "no", ""))], 0.0))
    assert (ticket, result.error.code, result.error.message) == (1, "nonfinite_logits", "no")
    assert list(scheduler.slots[0].leases) == [2]


def test_a_lease_the_worker_cannot_hold_stops_everything():
    scheduler = make()
    ready(scheduler, 0)
    for message in (Released(7, 0), Failed(7, "x", "y", ""), stepped(tokens=[(7, 1, b"")]).message):
        with pytest.raises(SchedulerError, match="lease 7"):
            scheduler.advance([FromWorker(0, message)], 0.0)


def test_killed_from_outside_nobody_is_charged_and_all_go_on_from_what_was_acknowledged():
    scheduler = make(num_workers=2, num_blocks=32)
    ready(scheduler, 0, 1)
    scheduler.advance([Submitted(1, request("a")), Submitted(2, request("b"))], 0.0)
    scheduler.advance([stepped(0, tokens=[(1, 5, b"x")])], 1.0)
    sent = scheduler.advance([WorkerDied(0, "killed by SIGKILL", crashed=False)], 2.0)
    assert sent == [StartWorker(0)]
    assert begun(ready(scheduler, 0)) == [(0, 3, 41)]  # prompt and one token, to be computed again
    assert all(sequence.charged_at is None for sequence in scheduler.sequences.values())
    scheduler.check()


def test_crashes_single_out_the_row_that_causes_them():
    scheduler = make(max_active=3, num_blocks=32)
    ready(scheduler, 0)
    scheduler.advance([Submitted(t, request(k)) for t, k in enumerate(["fine", "poison", "too"], 1)], 0.0)
    scheduler.advance([stepped(prefilled=[(1, 16)])], 0.0)
    sent = scheduler.advance([WorkerDied(0, "killed by SIGSEGV", crashed=True)], 0.0)
    assert sent == [StartWorker(0)]
    ((_, lease, _),) = begun(ready(scheduler, 0))  # one suspect at a time
    sent = scheduler.advance([stepped(prefilled=[(lease, 16)])], 0.0)
    assert begun(sent) == []  # as far as before: proves nothing
    sent = scheduler.advance([stepped(prefilled=[(lease, 32)])], 0.0)
    ((_, poison, _),) = begun(sent)
    assert sent[0].message.alone_until == 0
    scheduler.advance([WorkerDied(0, "killed by SIGSEGV", crashed=True, alone=poison)], 0.0)
    assert [s.charged_at for s in scheduler.sequences.values()] == [None, 0, 0]  # bystanders are not charged
    assert [s.deaths_alone for s in scheduler.sequences.values()] == [0, 1, 0]
    sent = ready(scheduler, 0)
    poison = next(x.message.lease for x in sent if x.message.alone_until == 0)
    sent = scheduler.advance([WorkerDied(0, "killed by SIGSEGV", crashed=True, alone=poison)], 0.0)
    ((ticket, result),) = finishes(sent)
    assert (ticket, result.error.code) == (2, "worker_crashed")
    assert "SIGSEGV" in result.error.message
    assert StartWorker(0) in sent
    scheduler.check()


def test_a_suspect_that_moves_on_is_cleared():
    scheduler = make()
    ready(scheduler, 0)
    scheduler.advance([Submitted(1, request())], 0.0)
    scheduler.advance([WorkerDied(0, "exit code 1", crashed=True)], 0.0)
    ready(scheduler, 0)
    (sequence,) = scheduler.sequences.values()
    assert sequence.charged_at == 0
    scheduler.advance([WorkerDied(0, "exit code 1", crashed=True, alone=2)], 0.0)
    ready(scheduler, 0)
    scheduler.advance([stepped(prefilled=[(3, 16)])], 0.0)
    assert (sequence.charged_at, sequence.deaths_alone) == (None, 0)


def test_deaths_without_progress_lower_the_count_but_not_below_one():
    scheduler = make(num_workers=2)
    assert scheduler.advance([WorkerDied(0, "x", crashed=False)], 0.0) == [StartWorker(0)]
    assert scheduler.advance([WorkerDied(0, "x", crashed=False)], 0.0) == [RetireWorker(0, "x")]
    for _ in range(4):
        assert scheduler.advance([WorkerDied(1, "y", crashed=False)], 0.0) == [StartWorker(1)]
    sent = scheduler.advance([Submitted(1, request()), WorkerDied(1, "y", crashed=False)], 0.0)
    assert [type(x) for x in sent] == [Finish, Send, GiveUp]
    assert sent[0].result.error.code == "engine_failed" and "y" in sent[2].reason
    ((_, result),) = finishes(scheduler.advance([Submitted(2, request())], 0.0))
    assert result.error.code == "engine_failed"


def test_progress_or_idleness_between_deaths_keeps_the_count():
    scheduler = make(num_workers=2, num_blocks=32)
    for _ in range(100):
        ready(scheduler, 0, 1)
        assert scheduler.advance([WorkerDied(1, "x", crashed=False)], 0.0) == [StartWorker(1)]  # it idled
        ready(scheduler, 1)
        assert scheduler.advance([WorkerDied(0, "x", crashed=False)], 0.0) == [StartWorker(0)]
        ready(scheduler, 0)
        scheduler.advance([Submitted(1, request("a", 8, 2))], 0.0)
        lease = next(iter(scheduler.slots[0].leases))
        scheduler.advance([stepped(0, tokens=[(lease, 5, b"")], finished=[(lease, "stop")])], 0.0)


def test_a_file_of_poison_is_set_aside_row_by_row_but_not_for_ever():
    scheduler = make(max_active=1, num_blocks=64)
    scheduler.advance([Submitted(ticket, request(str(ticket), 8, 8)) for ticket in range(1, 50)], 0.0)
    aside, given_up = 0, []
    while not given_up:
        (begin,) = (x.message for x in ready(scheduler, 0) if isinstance(x.message, Begin))
        alone = begin.lease if begin.alone_until is not None else 0
        sent = scheduler.advance([WorkerDied(0, "killed by SIGILL", crashed=True, alone=alone)], 0.0)
        aside += sum(result.error.code == "worker_crashed" for _, result in finishes(sent))
        given_up = [x for x in sent if isinstance(x, GiveUp)]
        scheduler.check()
    assert aside == 64 // 3 and "SIGILL" in given_up[0].reason


def test_workers_that_say_they_can_never_start():
    scheduler = make(num_workers=2)
    assert scheduler.advance([WorkerDied(0, "no", True, hopeless=True)], 0.0) == [RetireWorker(0, "no")]
    assert scheduler.advance([WorkerDied(1, "no", True, hopeless=True)], 0.0) == [
        Send(1, Stop()),
        GiveUp("no worker can go on: no"),
    ]


def test_closing_ends_everything():
    scheduler = make(num_workers=2, max_active=1)
    ready(scheduler, 0)
    scheduler.advance([Submitted(1, request("a")), Submitted(2, request("b")), Submitted(3, request("c"))], 0.0)
    sent = scheduler.advance([Closing()], 0.0)
    assert [result.error.code for _, result in finishes(sent)] == ["engine_closed"] * 3
    assert [x.worker for x in sent if x not in finishes(sent) and isinstance(x, Send)] == [0, 1]
    assert scheduler.advance([stepped(tokens=[(1, 5, b"")]), WorkerDied(0, "x", crashed=True)], 0.0) == []
    scheduler.check()
