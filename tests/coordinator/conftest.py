"""A world without processes: the real scheduler and real worker loops, make-believe models, time that stands still."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from collections import Counter, deque
from pathlib import Path

import pytest

from coremill.config.counters import CounterPage, create_page
from coremill.config.messages import Borrow, Ready, Stop, decode, encode
from coremill.config.request import SequenceRequest, SequenceResult
from coremill.config.topology import CoreGroup
from coremill.coordinator.events import (
    Cancelled,
    Finish,
    FromWorker,
    GiveUp,
    Paused,
    RetireWorker,
    Send,
    StartWorker,
    Submitted,
    WorkerDied,
    Workers,
)
from coremill.coordinator.limits import Limits
from coremill.coordinator.scheduler import Scheduler
from coremill.worker.batch import StepOutput
from coremill.worker.loop import WorkerLoop

HERE = Path(__file__).parent


def load_module(path: Path):
    """A module of the tests by its path, as pytest's importlib mode keeps their folders off sys.path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


makebelieve = load_module(HERE / "makebelieve.py")
VOCAB, STOP_ID, POISON = makebelieve.VOCAB, makebelieve.STOP_ID, makebelieve.POISON
TOKEN_BYTES, FakeBatch = makebelieve.TOKEN_BYTES, makebelieve.FakeBatch
expected, next_token = makebelieve.expected, makebelieve.next_token


class Crash(Exception):
    """The make-believe worker dies of its own doing."""


class FakeModel:
    """Keeps tokens in the arena where a model keeps keys and values, and reads all of them back to go on.

    full_blocks: how often the last token of each full block was computed, by all tokens up to it.
    """

    def __init__(self, arena: dict[tuple[int, int], int], full_blocks: Counter) -> None:
        self.arena, self.full_blocks = arena, full_blocks

    def new_batch(self):
        return FakeBatch()

    def profile(self):
        return []

    def borrow(self, cores):
        pass

    def copy_block(self, source, target, num_tokens):
        for at in range(num_tokens):
            self.arena[target, at] = self.arena[source, at]

    def step(self, batch):
        outputs = []
        for tokens, position, blocks, sample in batch:
            if POISON in tokens:
                raise Crash
            for at, token in enumerate(tokens, position):
                self.arena[blocks[at // 32], at % 32] = token
                if at % 32 == 31:
                    self.full_blocks[tuple(self.arena[blocks[i // 32], i % 32] for i in range(at + 1))] += 1
            if sample is not None:
                seen = [self.arena[blocks[at // 32], at % 32] for at in range(position + len(tokens))]
                outputs.append(StepOutput(next_token(seen, sample.seed), "ok"))
        return outputs


class SimulatedWorker:
    """A worker's loop with queues for a socket."""

    def __init__(self, arena, full_blocks: Counter, step_tokens: int, counters: CounterPage) -> None:
        self.inbox: deque[bytes] = deque()
        self.outbox: deque[bytes] = deque([encode(Ready("fake", 0, 0.0))])
        self.stepped = self.stopped = False
        self.counters = counters
        self.loop = WorkerLoop(
            self,
            FakeModel(arena, full_blocks),
            TOKEN_BYTES,
            step_tokens=step_tokens,
            counters=counters,
            measure=lambda: None,
        )

    def send(self, message) -> None:
        self.outbox.append(encode(message))

    def hear(self, count: int) -> None:
        for _ in range(min(count, len(self.inbox))):
            message = decode(self.inbox.popleft())
            if isinstance(message, Stop):
                self.stopped = True
            else:
                self.loop.hear(message)

    def step(self) -> bool:
        plan = self.loop.plan()
        if plan:
            self.loop.step(plan)
            self.stepped = True
        return bool(plan)


class World:
    """A scheduler and its workers. Every change is followed by a look into all books."""

    def __init__(self, limits: Limits, step_tokens: int = 16) -> None:
        self.scheduler = Scheduler(limits, (STOP_ID,))
        self.step_tokens = step_tokens
        self.arena: dict[tuple[int, int], int] = {}
        self.full_blocks: Counter = Counter()
        self.workers: dict[int, SimulatedWorker] = {}
        self.pages = {index: CounterPage(create_page("test")) for index in range(limits.num_workers)}
        self.requests: dict[int, SequenceRequest] = {}
        self.results: dict[int, SequenceResult] = {}
        self.lent: dict[int, tuple[int, ...]] = {}  # by borrower, as far as it has been told
        self.num_loans = 0
        self.num_wanted = limits.num_workers
        self.retired: list[int] = []
        self.given_up: str | None = None
        self.now = 0.0
        self.carry_out(self.scheduler.start())

    # ---- what can happen ----

    def submit(self, request: SequenceRequest) -> int:
        ticket = len(self.requests) + 1
        self.requests[ticket] = request
        self.happen(Submitted(ticket, request))
        return ticket

    def cancel(self, ticket: int) -> None:
        self.happen(Cancelled(ticket))

    def set_workers(self, count: int) -> None:
        self.num_wanted = count
        self.happen(Workers(count))

    def pause(self, paused: bool) -> None:
        self.happen(Paused(paused))

    def deliver(self, index: int, count: int = 1_000_000) -> None:
        """Messages of a worker reach the coordinator."""
        worker = self.workers[index]
        for _ in range(min(count, len(worker.outbox))):
            self.happen(FromWorker(index, decode(worker.outbox.popleft())))

    def step(self, index: int) -> bool:
        """One step of a worker, which may be its last."""
        try:
            return self.workers[index].step()
        except Crash:
            self.die(index, crashed=True)
            return True

    def die(self, index: int, crashed: bool = False, hopeless: bool = False) -> None:
        """What it has said has been heard or not; from here on nothing of it is."""
        del self.workers[index]
        self.lent.pop(index, None)
        alone = self.pages[index]["alone_lease"]
        self.pages[index]["alone_lease"] = 0
        self.happen(WorkerDied(index, "SIGSEGV" if crashed else "SIGKILL", crashed, alone, hopeless))

    # ---- the shell ----

    def happen(self, *events) -> None:
        self.now += 0.25
        self.carry_out(self.scheduler.advance(events, self.now))
        self.check()

    def carry_out(self, instructions) -> None:
        for instruction in instructions:
            match instruction:
                case StartWorker(index):
                    assert index not in self.workers, "started twice"
                    page = self.pages[index]
                    self.workers[index] = SimulatedWorker(self.arena, self.full_blocks, self.step_tokens, page)
                case Send(index, message):
                    if isinstance(message, Borrow):
                        self.num_loans += bool(message.cores)
                        self.lent[index] = message.cores
                    if index in self.workers:
                        self.workers[index].inbox.append(encode(message))
                case Finish(ticket, result):
                    assert ticket not in self.results, "finished twice"
                    self.results[ticket] = result
                case RetireWorker(index, _):
                    self.retired.append(index)
                case GiveUp(reason):
                    self.given_up = reason

    def check(self) -> None:
        self.scheduler.check()
        writable: list[int] = []  # of sequences that workers hold: from the block of the next token on
        read: set[int] = set()
        for worker in self.workers.values():
            for sequence in worker.loop.sequences.values():
                writable += sequence.blocks[sequence.computed // 32 :]
                read.update(sequence.blocks[: sequence.computed // 32])
        assert len(writable) == len(set(writable)), "two workers may write to one block"
        assert not read & set(writable), "a worker may write to a block that another reads"
        self.check_loans()

    def check_loans(self) -> None:
        """Nothing is lent twice, or while its owner has a use for it; otherwise all that can be is, evenly."""
        scheduler, groups = self.scheduler, self.scheduler.limits.groups
        ready = [slot for slot in scheduler.slots if slot.state == "ready"]
        idle, busy = [slot for slot in ready if not slot.leases], [slot for slot in ready if slot.leases]
        lent = [core for cores in self.lent.values() for core in cores]
        assert len(lent) == len(set(lent)), "a core is lent twice"
        assert set(lent) <= {core for slot in idle for core in groups[slot.index].cores}, "lent by one that needs it"
        assert all(index in [slot.index for slot in busy] for index, cores in self.lent.items() if cores)
        on_their_way = any(lease.closing for slot in scheduler.slots for lease in slot.leases.values())
        if groups and idle and busy and not on_their_way:
            assert len(lent) == sum(len(groups[slot.index].cores) for slot in idle), "somebody could lend"
            counts = Counter(scheduler.loans.borrower_of.values())
            assert max(counts.values()) - min(counts[slot.index] for slot in busy) <= 1, "lent unevenly"

    def turn(self) -> bool:
        """Everybody does all there is to do once; False when there was nothing."""
        busy = False
        for index in list(self.workers):
            if index in self.workers:
                self.workers[index].hear(1_000_000)
                busy |= self.step(index)
            if index in self.workers:
                busy |= bool(self.workers[index].outbox)
                self.deliver(index)
            if index in self.workers and self.workers[index].stopped:
                busy = True
                self.die(index)
        return busy

    def run(self, turns: int = 100_000) -> None:
        """Until nothing moves; everything must have ended by then."""
        for _ in range(turns):
            if not self.turn():
                break
        missing = self.requests.keys() - self.results.keys()
        assert not missing, f"lost or starved: {sorted(missing)}"
        counts = self.scheduler.count_blocks()
        unused = counts["free"] + counts["cached"]
        assert unused == self.scheduler.limits.num_blocks, f"blocks are missing at the end: {counts}"
        if not self.retired and self.given_up is None:
            states = [slot.state for slot in self.scheduler.slots]
            wanted = ["ready"] * self.num_wanted
            assert states == wanted + ["stopped"] * (len(states) - self.num_wanted), "not as many workers as asked for"
        for index, worker in self.workers.items():
            assert worker.loop.borrowing.cores == self.lent.get(index, ()) == (), "borrowed and not given back"

    def verify(self, ticket: int) -> None:
        """The result is that of an undisturbed run."""
        result = self.results[ticket]
        assert result.error is None, result.error
        assert (result.token_ids, result.text, result.finish_reason) == expected(self.requests[ticket])


def core_groups(num_workers: int, size: int = 1) -> tuple[CoreGroup, ...]:
    """Two groups on each NUMA node."""
    cores = [tuple(range(index * size, (index + 1) * size)) for index in range(num_workers)]
    return tuple(CoreGroup(mine, numa=index // 2) for index, mine in enumerate(cores))


def random_request(rng: random.Random, key: str, longest: int = 120, family: int = 0) -> SequenceRequest:
    """family: requests of a family (0: none) begin with the same tokens, up to some point."""
    num_prompt = min(rng.choice([1, rng.randint(1, longest), rng.randint(1, 31), 32, 33]), longest)
    prompt = [rng.randrange(1, POISON) for _ in range(num_prompt)]
    if family:
        common = random.Random(family)
        shared = [common.randrange(1, POISON) for _ in range(longest)]
        cut = rng.choice([0, 5, 31, 32, 33, 64, 70, rng.randint(0, longest)])
        prompt[:cut] = shared[: min(cut, num_prompt)]
    return SequenceRequest(
        key,
        tuple(prompt),
        max_tokens=rng.choice([1, 2, rng.randint(1, 60)]),
        seed=rng.randrange(1 << 64),
        stop=rng.choice([(), (), (b"abc",), (b"ddd", b"ee"), (b"aa", b"aab")]),
        priority=rng.choice([0, 0, 0, 1, 2]),
    )


@pytest.fixture
def world():
    """World(limits...) of which every row can be verified."""

    def make(num_workers=1, max_active=4, num_blocks=64, step_tokens=16, max_length=1024) -> World:
        groups = core_groups(num_workers)
        return World(Limits(num_workers, max_active, num_blocks, max_length, VOCAB, groups=groups), step_tokens)

    return make


@pytest.fixture(scope="session")
def sim():
    """This module, for tests that need more of it than `world`."""
    return sys.modules[__name__]


@pytest.fixture(scope="session")
def tiny_pack(tmp_path_factory) -> Path:
    """A random model of two small layers, packed."""
    import numpy as np

    from coremill.native.cache import ensure_pack

    folder = tmp_path_factory.mktemp("tiny")
    writer = load_module(HERE.parent / "native" / "gguf_writer.py")
    (folder / "tiny.gguf").write_bytes(writer.tiny_llama(np.random.default_rng(1)).build())
    return ensure_pack(folder / "tiny.gguf", cache_dir=folder / "cache")


@pytest.fixture
def engine(tiny_pack):
    """start(num_workers=1, fake=True, **config) -> a running Engine, closed after the test."""
    from coremill.config.engine import EngineConfig
    from coremill.config.topology import CoreGroup
    from coremill.coordinator.engine import Engine
    from coremill.coordinator.pool import WORKER_COMMAND

    engines = []

    def start(num_workers=1, fake=True, groups=None, **config) -> Engine:
        cores = sorted(os.sched_getaffinity(0))
        groups = [CoreGroup(group) for group in groups or [(cores[i % len(cores)],) for i in range(num_workers)]]
        command = (sys.executable, str(HERE / "fake_worker.py")) if fake else WORKER_COMMAND
        events: list[dict] = []
        engine = Engine(
            tiny_pack,
            EngineConfig(**config),
            groups,
            on_event=events.append,
            worker_command=command,
            stop_ids=(STOP_ID,),
        )
        engines.append(engine)
        engine.start()
        engine.events = events
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def coordinator(tiny_pack, monkeypatch):
    """start(fake=False, **options) -> a Coordinator, closed after the test. fake: workers with a make-believe model."""
    from coremill.coordinator import Coordinator
    from coremill.coordinator.engine import Engine
    from coremill.coordinator.python import local

    def new_engine(pack_path, config, on_event):
        cores = sorted(os.sched_getaffinity(0))
        groups = [CoreGroup((cores[index % len(cores)],)) for index in range(config.workers or 1)]
        command = (sys.executable, str(HERE / "fake_worker.py"))
        return Engine(pack_path, config, groups, on_event=on_event, worker_command=command, stop_ids=(STOP_ID,))

    made = []

    def start(fake=False, **options) -> Coordinator:
        with monkeypatch.context() as patch:
            if fake:
                patch.setattr(local, "_new_engine", new_engine)
            made.append(Coordinator(tiny_pack, **options))
        return made[-1]

    yield start
    for each in made:
        each.close()
