"""Between the pure scheduler and the world: sockets, processes, clocks. Used by one thread at a time.

    poll( ROUTER | pidfds | wake-up ) -> events -> scheduler.advance -> instructions -> sent, started, finished

The poll has no timeout unless a worker has work, so whoever idles costs no CPU. While one has, somebody looks every
second whether it gets on (coordinator/watchdog.py).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import zmq

from coremill.config.engine import EngineConfig
from coremill.config.errors import EngineError, WorkerStartError
from coremill.config.messages import PROTOCOL_VERSION, Failed, Hello, Measured, Ready, Settings, Stats
from coremill.config.request import SequenceResult
from coremill.config.topology import CoreGroup
from coremill.coordinator.events import (
    Closing,
    Event,
    Finish,
    FromWorker,
    GiveUp,
    Instruction,
    RetireWorker,
    Send,
    Show,
    StartWorker,
    WorkerDied,
    WorkerStopped,
)
from coremill.coordinator.limits import Limits
from coremill.coordinator.pool import WorkerPool, WorkerProcess
from coremill.coordinator.scheduler import Scheduler
from coremill.coordinator.stats import Places
from coremill.coordinator.storage import Storage
from coremill.coordinator.transport import Transport
from coremill.coordinator.watchdog import START_FACTOR, Watchdog

# How long the last words of a worker that is gone are waited for, in milliseconds.
_LAST_WORDS_MS = 200
# How long workers may take to leave by themselves when the engine closes, in milliseconds.
_FAREWELL_MS = 200
# The books are checked whenever there is nothing to do, but not more often than this, in seconds.
_CHECK_SECONDS = 1.0
# Number of a request for Stats whose answer nobody waits for.
_SIGN_OF_LIFE = 0


class Shell:
    """Carries out what the scheduler says.

    Args:
        on_finish: called with (ticket, result) once for every submitted sequence.
        on_text: called with (ticket, bytes) for each piece of a watched sequence's text.
        on_event: told what happens to workers (see Engine).
    """

    def __init__(
        self,
        storage: Storage,
        config: EngineConfig,
        groups: Sequence[CoreGroup],
        worker_command: Sequence[str],
        on_finish: Callable[[int, SequenceResult], None],
        on_text: Callable[[int, bytes], None],
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self.config = config
        self.failure: EngineError | None = None
        self.num_finished = self.num_failed = 0
        self._storage = storage
        self._on_finish, self._on_text, self._on_event = on_finish, on_text, on_event
        self.pool = WorkerPool(groups, worker_command)
        self.places = Places(groups)
        self._workers: dict[bytes, WorkerProcess] = {}
        self._measuring: dict[int, tuple[Future, set[int]]] = {}
        self._num_requests = 0
        self._closing = False
        self._watchdog = Watchdog(config.stuck_after)
        self._debug_books = os.environ.get("COREMILL_DEBUG_BOOKS", "0") not in ("", "0")
        self._next_check = 0.0
        self._transport: Transport | None = None
        self._poller = zmq.Poller()
        try:
            # Processes first: they import what they need while we do.
            self._spawn(range(len(groups)))
            self._transport = Transport()
            self._poller.register(self._transport.socket, zmq.POLLIN)
            self._brief(list(self._workers.values()))
            self.scheduler = Scheduler(self._limits(), storage.stop_ids)
        except BaseException:
            self.close()
            raise

    def _limits(self) -> Limits:
        return Limits(
            num_workers=len(self.pool.groups),
            max_active=self.config.max_active,
            num_blocks=self._storage.geometry.num_blocks,
            max_length=self._storage.max_length,
            vocab_size=self._storage.pack.spec.vocab_size,
            prefix_cache=self.config.prefix_cache,
            groups=tuple(self.pool.groups) if self.config.lending else (),
        )

    @property
    def all_ready(self) -> bool:
        return all(slot.state != "starting" for slot in self.scheduler.slots)

    def watch(self, fd: int) -> None:
        """Also wake up when this descriptor is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def sleep(self, at_most: float | None = None) -> list[Event]:
        """Until something happens, or `at_most` seconds; what has been heard from workers and of their ends."""
        watched = any(map(self._has_work, self._workers.values()))
        limits = (at_most, self._watchdog.interval if watched else None)
        timeout = min((limit for limit in limits if limit is not None), default=None)
        active = dict(self._poller.poll(None if timeout is None else math.ceil(timeout * 1000)))
        events = self._drain()
        for worker in list(self._workers.values()):
            if worker.pidfd in active:
                events += self._bury(worker)
        if watched and self._watchdog.due(now := time.monotonic()):
            self._look(now)
        return events

    def _has_work(self, worker: WorkerProcess) -> bool:
        """Whether it should show signs of life, that is, unless it only waits for work or has been killed."""
        slot = self.scheduler.slots[worker.index]
        return worker.stuck is None and bool(worker.ready is None or slot.leases or slot.told_to_stop)

    def _look(self, now: float) -> None:
        """Ask those that have been quiet for long, kill those that do not answer."""
        busy = {}
        for identity, worker in self._workers.items():
            if self._has_work(worker):
                signs = (self.places[worker.index].counters["operations"], worker.num_heard)
                busy[identity] = (START_FACTOR if worker.ready is None else 1, signs)
        verdict = self._watchdog.look(now, busy)
        for identity in verdict.ask:
            self._transport.send(identity, Stats(_SIGN_OF_LIFE))
        for identity in verdict.stuck:
            self.pool.kill_stuck(self._workers[identity], self.config.stuck_after * busy[identity][0])

    def advance(self, events: Iterable[Event]) -> None:
        """One turn of the scheduler."""
        events, scheduler = list(events), self.scheduler
        if self._debug_books:
            for event in events:
                self._carry_out(scheduler.advance([event], time.monotonic()))
                scheduler.check()
        else:
            self._carry_out(scheduler.advance(events, time.monotonic()))
        if events and not scheduler.sequences and not any(slot.leases for slot in scheduler.slots):
            self._check_when_idle()

    def _check_when_idle(self) -> None:
        """The books, when nobody waits for anything; not after each of many short requests."""
        now = time.monotonic()
        if now >= self._next_check:
            self.scheduler.check()
            self._next_check = now + _CHECK_SECONDS

    def measure(self, done: Future) -> None:
        """Ask all workers for their memory; `done` gets its result when all have answered or are gone."""
        self._num_requests += 1
        asked = {worker.index for worker in self._workers.values() if worker.ready}
        self._measuring[self._num_requests] = (done, asked)
        for worker in list(self._workers.values()):
            if worker.ready:
                self._transport.send(worker.identity, Stats(self._num_requests))
        self._measured(None, None)

    def close(self) -> None:
        """End all workers, wait for them, leave nothing behind."""
        self._closing = True
        deadline = time.monotonic() + _FAREWELL_MS / 1000
        while self._transport and self._workers and (left := deadline - time.monotonic()) > 0:
            active = dict(self._poller.poll(left * 1000))
            self._drain()
            for worker in list(self._workers.values()):
                if worker.pidfd in active:
                    self._bury(worker)
        self.pool.close()
        if self._transport:
            self._transport.close()
        for done, _ in self._measuring.values():
            done.set_result(None)
        for place in self.places:
            place.state = "stopped"
        self.places.close()

    # ---- what workers say ----

    def _drain(self) -> list[Event]:
        events: list[Event] = []
        while (received := self._transport.receive()) is not None:
            worker = self._workers.get(received[0])
            if worker is not None:  # else it is dead and buried, and what it held runs elsewhere
                events += self._hear(worker, received[1])
        return events

    def _hear(self, worker: WorkerProcess, message) -> list[Event]:
        worker.num_heard += 1
        match message:
            case Hello():
                return self._greet(worker, message)
            case Ready():
                worker.ready = message
                place = self.places[worker.index]
                place.ready, place.state = message, "ready"
                self._on_event({"event": "worker_ready", "worker": worker.index, "pid": worker.pid})
            case Measured():
                self.places[worker.index].memory = message
                self._measured(message.request, worker.index)
                return []
            case Failed(lease=None):
                worker.failure = message
                return []
        return [FromWorker(worker.index, message)]

    def _greet(self, worker: WorkerProcess, hello: Hello) -> list[Event]:
        worker.hello = hello
        problem = self.pool.check_affinity(worker)
        if hello.version != PROTOCOL_VERSION:
            problem = f"worker {worker.index} speaks protocol {hello.version}, this coordinator {PROTOCOL_VERSION}"
        if problem:
            self.failure = WorkerStartError(problem)
            return [Closing("engine_failed", problem)]
        if all(other.hello for other in self._workers.values()):
            self._transport.close_door()
        return []

    def _measured(self, request: int | None, index: int | None) -> None:
        for number, (done, asked) in list(self._measuring.items()):
            if number == request or request is None:
                asked.discard(index)
            if not asked:
                del self._measuring[number]
                done.set_result(None)

    # ---- ends of processes ----

    def _bury(self, worker: WorkerProcess) -> list[Event]:
        """A process has ended: hear its last words, reap it, tell the scheduler."""
        events = self._drain()
        self._poller.unregister(worker.pidfd)
        status = worker.process.wait()
        if status == 1 and worker.failure is None:  # it has said why, but that has not arrived yet
            waiting = self._transport.socket.poll(_LAST_WORDS_MS)
            events += self._drain() if waiting else []
        alone = self.places[worker.index].counters["alone_lease"]
        self.places[worker.index].counters["alone_lease"] = 0
        del self._workers[worker.identity]
        self._transport.leave(worker.endpoint)
        death = self.pool.reap(worker)
        place = self.places[worker.index]
        place.state, place.pid = "starting", None
        self._measured(None, worker.index)
        leaving = self.scheduler.slots[worker.index].told_to_stop
        if not (self._closing or leaving):
            place.last_death, place.has_died = death.cause, True
            traceback = worker.failure.traceback if worker.failure else ""
            died = {"event": "worker_died", "worker": worker.index, "pid": worker.pid, "cause": death.cause}
            self._on_event(died | {"traceback": traceback})
            if change := self._storage.pack_change():  # nobody can go on with it, and no row is to blame
                self.failure = EngineError(f"worker {worker.index} died ({death.cause}): {change}")
                events.append(Closing("engine_failed", str(self.failure)))
        hopeless = worker.failure is not None and worker.ready is None
        events.append(WorkerDied(worker.index, death.cause, death.crashed, alone, hopeless))
        return events

    # ---- instructions ----

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        to_start = []
        for instruction in instructions:
            match instruction:
                case Send(index, message):
                    worker = self.pool.processes.get(index)
                    if worker is not None:  # else its end is already known and its sequences are waiting again
                        self._transport.send(worker.identity, message)
                case Finish(ticket, result):
                    self.num_finished += result.error is None
                    self.num_failed += result.error is not None
                    self._on_finish(ticket, result)
                case Show(ticket, text):
                    self._on_text(ticket, text)
                case StartWorker(index):
                    to_start.append(index)
                case RetireWorker(index, cause):
                    self.places[index].state = "retired"
                    self._on_event({"event": "worker_retired", "worker": index, "cause": cause})
                case WorkerStopped(index):
                    self.places[index].state = "stopped"
                    self._on_event({"event": "worker_stopped", "worker": index})
                case GiveUp(reason):
                    never_ready = all(place.ready is None for place in self.places)
                    self.failure = (WorkerStartError if never_ready else EngineError)(reason)
        if to_start:
            self._brief(self._spawn(to_start))

    def _spawn(self, indices: Iterable[int]) -> list[WorkerProcess]:
        spawned = []
        for index in indices:
            place = self.places[index]
            worker = self.pool.spawn(index, [self._storage.arena_fd, place.page_fd])
            place.pid, place.state = worker.pid, "starting"
            place.num_restarts += place.has_died
            place.has_died = False
            self._workers[worker.identity] = worker
            spawned.append(worker)
        return spawned

    def _brief(self, workers: Iterable[WorkerProcess]) -> None:
        for worker in workers:
            self._poller.register(worker.pidfd, zmq.POLLIN)
            worker.endpoint = self._transport.open_door()
            self.pool.brief(worker, self._settings(worker))
            self._on_event({"event": "worker_started", "worker": worker.index, "pid": worker.pid})

    def _settings(self, worker: WorkerProcess) -> Settings:
        storage = self._storage
        return Settings(
            worker=worker.index,
            endpoint=worker.endpoint,
            identity=worker.identity,
            cores=self.pool.groups[worker.index].cores,
            pack=os.fspath(storage.pack.path),
            arena_fd=storage.arena_fd,
            arena=storage.geometry_fields,
            counters_fd=self.places[worker.index].page_fd,
            max_active=self.config.max_active,
            step_tokens=self.config.step_tokens,
            profile=self.config.profile,
        )
