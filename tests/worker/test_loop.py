"""The worker's loop without a socket: what a step holds, and what is said about it."""

from __future__ import annotations

from collections import deque

import pytest

from coremill.config.counters import CounterPage, create_page
from coremill.config.errors import EngineError
from coremill.config.messages import (
    Begin,
    Borrow,
    Cancel,
    Extend,
    Failed,
    Hello,
    Measured,
    ProtocolError,
    Release,
    Released,
    Stats,
    Stepped,
    Stop,
)
from coremill.config.smaps import Memory, measure_memory, split_memory
from coremill.worker.batch import StepOutput
from coremill.worker.loop import WorkerLoop
from coremill.worker.sequences import max_step_rows, plan_step, prefill_floor

TOKEN_BYTES = [b"", b"a", b"b", b"c", b"<", b"end>", b"\xc3", b"\xa9"]
END = 0


class Batch(list):
    def add(self, tokens, position, blocks, sample=None):
        self.append((list(tokens), position, list(blocks), sample))


class ScriptedModel:
    """Says `script` whatever it is asked, then "a" for ever."""

    def __init__(self, *script) -> None:
        self.script = deque(script)
        self.batches: list[list] = []

    def new_batch(self):
        return Batch()

    def profile(self):
        return [("qkv", "gemm", 3, 0.5)]

    def step(self, batch):
        self.batches.append(list(batch))
        tokens = [self.script.popleft() if self.script else 1 for row in batch if row[3] is not None]
        return [StepOutput(-1, "nonfinite") if token == "nan" else StepOutput(token, "ok") for token in tokens]


class Channel:
    def __init__(self) -> None:
        self.inbox: deque = deque()
        self.sent: list = []
        self.waited = 0

    def send(self, message) -> None:
        self.sent.append(message)

    def receive(self, wait):
        self.waited += wait and not self.inbox
        return self.inbox.popleft() if self.inbox else (Stop() if wait else None)


def make(model=None, step_tokens=8) -> WorkerLoop:
    return WorkerLoop(
        Channel(),
        model or ScriptedModel(),
        TOKEN_BYTES,
        step_tokens=step_tokens,
        counters=CounterPage(create_page("test")),
        measure=lambda: Memory(5, 4, 1, 2, 1),
    )


def begin(lease=1, num_tokens=3, num_prompt=None, blocks=(0, 1, 2), max_tokens=10, **more) -> Begin:
    fields = {"computed": 0, "alone_until": None, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0}
    fields["copy"] = None
    return Begin(
        lease=lease,
        tokens=(1,) * num_tokens,
        num_prompt=num_tokens if num_prompt is None else num_prompt,
        blocks=tuple(blocks),
        max_tokens=max_tokens,
        **{**fields, "stop": (), "stop_ids": (END,), **more},
    )


def planned(loop) -> list[tuple[int, int]]:
    return [(sequence.lease, count) for sequence, count in loop.plan()]


def step(loop) -> Stepped:
    sent = len(loop.channel.sent)
    loop.step(loop.plan())
    return loop.channel.sent[sent]


def test_decode_rows_first_then_chunks_up_to_the_budget():
    loop = make(step_tokens=8)
    for lease, length in [(1, 3), (2, 20), (3, 20)]:
        loop.hear(begin(lease, length))
    assert planned(loop) == [(1, 3), (2, 5)]
    assert step(loop).prefilled == ((2, 5),)
    assert planned(loop) == [(1, 1), (2, 7)]  # full to the last row
    step(loop)
    assert planned(loop) == [(1, 1), (2, 7)]
    step(loop)
    assert planned(loop) == [(1, 1), (2, 1), (3, 6)]


def test_prefill_moves_even_when_decode_rows_fill_the_step():
    loop = make(step_tokens=4)
    for lease in range(1, 7):
        loop.hear(begin(lease, 1))
    loop.hear(begin(7, 30))
    assert planned(loop) == [*((lease, 1) for lease in range(1, 7)), (7, prefill_floor(4))]
    assert sum(count for _, count in planned(loop)) <= max_step_rows(4, 7)


@pytest.mark.parametrize("step_tokens", [1, 2, 7, 64, 128])
@pytest.mark.parametrize("max_active", [1, 5, 16])
def test_a_step_is_never_larger_than_promised(step_tokens, max_active):
    for num_decoding in range(max_active + 1):
        loop = make(step_tokens=step_tokens)
        for lease in range(1, max_active + 1):
            loop.hear(begin(lease, 1 if lease <= num_decoding else 40))
        total = sum(count for _, count in plan_step(loop.sequences.values(), step_tokens))
        assert 0 < total <= max_step_rows(step_tokens, max_active)


def test_rows_without_blocks_wait_for_extend():
    loop = make(step_tokens=100)
    loop.hear(begin(1, 70, blocks=(4, 9)))
    assert planned(loop) == [(1, 64)]
    step(loop)
    assert planned(loop) == []
    loop.hear(Extend(1, (2,)))
    assert planned(loop) == [(1, 6)]
    step(loop)
    assert loop.model.batches[-1] == [([1] * 6, 64, [4, 9, 2], loop.sequences[1].sample)]


def test_a_suspect_has_its_steps_for_itself_until_it_has_moved_on():
    loop = make(step_tokens=8)
    loop.hear(begin(1, 3))
    loop.hear(begin(2, 12, alone_until=8))
    seen = []

    def watch(batch, inner=loop.model.step):
        seen.append(loop.counters["alone_lease"])
        return inner(batch)

    loop.model.step = watch
    plans = []
    for _ in range(4):
        plans.append(planned(loop))
        step(loop)
    assert plans == [[(2, 8)], [(2, 4)], [(2, 1), (1, 3)], [(1, 1), (2, 1)]]
    assert seen == [2, 2, 0, 0] and loop.counters["alone_lease"] == 0


def test_text_comes_with_its_token_and_ends_before_the_stop_string():
    loop = make(ScriptedModel(1, 4, 2, 4, 5))
    loop.hear(begin(stop=(b"<end>",)))
    said = [step(loop) for _ in range(5)]
    assert [stepped.tokens for stepped in said] == [
        ((1, 1, b"a"),),
        ((1, 4, b""),),
        ((1, 2, b"<b"),),
        ((1, 4, b""),),
        ((1, 5, b""),),
    ]
    assert [stepped.finished for stepped in said] == [()] * 4 + [((1, "stop"),)]
    assert loop.sequences == {}


def test_held_text_is_shown_when_it_ends_otherwise():
    loop = make(ScriptedModel(4, END))
    loop.hear(begin(1, stop=(b"<end>",)))
    assert [step(loop).tokens for _ in range(2)] == [((1, 4, b""),), ((1, END, b"<"),)]
    loop = make(ScriptedModel(1, 4))
    loop.hear(begin(1, max_tokens=2, stop=(b"<end>",)))
    step(loop)
    last = step(loop)
    assert (last.tokens, last.finished) == (((1, 4, b"<"),), ((1, "length"),))


def test_the_end_token_on_the_last_place_is_a_stop():
    loop = make(ScriptedModel(END))
    loop.hear(begin(max_tokens=1))
    assert step(loop).finished == ((1, "stop"),)


def test_a_sequence_that_ran_before_goes_on_where_it_was():
    """Prompt of 2, generated "a<" elsewhere: read again, the held "<" still counts, and so do the two tokens."""
    loop = make(ScriptedModel(5))
    resumed = begin(1, num_tokens=4, num_prompt=2, max_tokens=3, stop=(b"<end>",))
    loop.hear(Begin(**{**{name: getattr(resumed, name) for name in resumed.__slots__}, "tokens": (1, 1, 1, 4)}))
    assert planned(loop) == [(1, 4)]
    last = step(loop)
    assert (last.tokens, last.finished) == (((1, 5, b""),), ((1, "stop"),))


def test_logits_that_are_not_finite_fail_their_sequence_only():
    loop = make(ScriptedModel("nan", 2))
    loop.hear(begin(1))
    loop.hear(begin(2))
    stepped = step(loop)
    assert stepped.tokens == ((2, 2, b"b"),)
    assert loop.channel.sent[-1] == Failed(
        1, "nonfinite_logits", "the model's logits for the next token are not finite numbers", ""
    )
    assert list(loop.sequences) == [2]


@pytest.mark.parametrize("kind", [Cancel, Release])
def test_giving_back_answers_with_what_is_computed(kind):
    loop = make(step_tokens=8)
    loop.hear(begin(1, 20))
    step(loop)
    loop.hear(kind(1))
    assert loop.channel.sent[-1] == Released(1, 8)
    loop.hear(kind(1))  # crossed with its end on the way: nothing to say
    loop.hear(Extend(1, (7,)))
    assert len(loop.channel.sent) == 2


@pytest.mark.parametrize("message", [Cancel(1), Extend(1, (2,)), Hello(1, 0, 1, ()), Released(1, 1)])
def test_what_a_worker_cannot_be_told(message):
    with pytest.raises(ProtocolError):
        make().hear(message)


def test_it_sleeps_only_when_nothing_can_run():
    loop = make(ScriptedModel(1, 1, END))
    loop.channel.inbox.append(begin(1))
    loop.channel.inbox.append(Stats(7))
    loop.run()
    assert loop.channel.waited == 1  # after the last step; the first message was there already
    kinds = [type(message) for message in loop.channel.sent]
    assert kinds == [Measured, Stepped, Stepped, Stepped]
    assert loop.channel.sent[0] == Measured(7, 5, 4, 1, 2, 1, (("qkv", "gemm", 3, 0.5),))


def test_counts():
    loop = make(ScriptedModel(1, 1, 1, END), step_tokens=16)
    loop.hear(begin(1, 10))
    loop.hear(begin(2, 8))
    while plan := loop.plan():
        loop.step(plan)
        if loop.counters["steps"] == 20:
            break
    counts = loop.counters.snapshot()
    assert counts["prefill_tokens"] == 18
    assert counts["decode_tokens"] == sum(len(m.tokens) for m in loop.channel.sent if isinstance(m, Stepped))
    assert counts["step_rows"] == sum(m.rows for m in loop.channel.sent if isinstance(m, Stepped))
    assert counts["busy_ns"] > 0 and counts["active"] == len(loop.sequences)


SMAPS = """\
7f0000000000-7f0000200000 r--s 00000000 fe:00 42                         /cache/a model.pack
Size:               2048 kB
Rss:                1024 kB
Pss:                 512 kB
VmFlags: rd sh mr
7f0000200000-7f0000400000 rw-s 00000000 00:01 9                          /memfd:coremill-arena (deleted)
Rss:                 100 kB
Pss:                  50 kB
7f0000400000-7f0000500000 rw-p 00000000 00:00 0
Rss:                  10 kB
Pss:                  10 kB
"""


def test_memory_is_split_by_mapping():
    found = split_memory(SMAPS.splitlines(True), "/cache/a model.pack", "/memfd:coremill-arena (deleted)")
    assert found == Memory(rss=1134 << 10, pss=572 << 10, weights=512 << 10, arena=50 << 10, private=10 << 10)


def test_memory_of_this_process():
    found = measure_memory("/nowhere", "nothing")
    assert found.rss >= found.pss == found.private > 1 << 20


class LendingModel(ScriptedModel):
    """Notes which cores it is told to use beside its own; has only two."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, ...]] = []

    def borrow(self, cores):
        self.told.append(cores)
        if not set(cores) <= {5, 6}:
            raise EngineError("borrowing refused: no such core")


def test_borrowed_cores_are_used_from_the_next_step_on_until_they_are_wanted_back():
    loop = make(LendingModel())
    loop.hear(begin(num_tokens=1))
    step(loop)
    assert loop.model.told == []
    loop.hear(Borrow((5,)))
    step(loop)
    step(loop)
    loop.hear(Borrow((6,)))
    step(loop)
    loop.hear(Borrow(()))
    step(loop)
    assert loop.model.told == [(5,), (6,), ()]
    assert (loop.counters["steps"], loop.counters["borrowed_steps"]) == (5, 3)


def test_a_core_that_the_kernel_refuses_is_done_without():
    loop = make(LendingModel())
    loop.hear(begin(num_tokens=1))
    loop.hear(Borrow((7,)))
    step(loop)
    step(loop)
    assert (loop.model.told, loop.counters["borrowed_steps"]) == ([(7,)], 0)
    loop.hear(Borrow((6,)))
    step(loop)
    assert (loop.model.told, loop.counters["borrowed_steps"]) == ([(7,), (6,)], 1)
