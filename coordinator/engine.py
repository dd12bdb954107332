"""The engine: sequences in from any thread, results out, one thread of its own in between.

Other threads put what they want into an inbox and wake the engine's thread, which alone touches the shell
(coordinator/shell.py): it sleeps, gathers events, asks the scheduler, and carries out what that says.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from coremill.config.engine import EngineConfig
from coremill.config.errors import ConfigError, EngineClosedError, EngineError, RequestError
from coremill.config.request import SequenceRequest, SequenceResult
from coremill.config.topology import CoreGroup
from coremill.coordinator.callbacks import call_back
from coremill.coordinator.events import Cancelled, Closing, Event, Paused, Submitted, Watched, Workers
from coremill.coordinator.figures import glance, report
from coremill.coordinator.pool import WORKER_COMMAND
from coremill.coordinator.shell import Shell
from coremill.coordinator.storage import Storage
from coremill.coordinator.timers import Timer, Timers

# Codes of results that say nothing about the request itself: whoever keeps a journal must not book them as its errors.
NOT_THE_REQUESTS_FAULT = frozenset({"cancelled", "engine_closed", "engine_failed"})
# How long `stats` waits for workers in the middle of a long step, in seconds.
_STATS_TIMEOUT = 10.0

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Runs sequences on worker processes, one per core group.

    Args:
        pack_path: the packed model.
        groups: the cores of each worker.
        on_event: told what happens to workers, as a dict with "event" (worker_started, worker_ready, worker_died,
            worker_stopped, worker_retired), "worker", and "pid" or "cause". Runs on the engine's thread.
        stop_ids: tokens that end generation; None: those of the model. Measurements give none.

    Every method may be called from any thread. Callbacks run on the engine's own thread and must be quick.

        engine = Engine(pack_path, EngineConfig(), discover())
        engine.start()
        ticket = engine.submit(SequenceRequest("a", prompt_ids, max_tokens=16), on_done=print)
        engine.close()
    """

    def __init__(
        self,
        pack_path: str | Path,
        config: EngineConfig,
        groups: Sequence[CoreGroup],
        *,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        worker_command: Sequence[str] = WORKER_COMMAND,
        stop_ids: Sequence[int] | None = None,
    ) -> None:
        self.pack_path = Path(pack_path)
        self.config = config
        self.groups = list(groups)
        self.startup_seconds: float | None = None
        self._on_event = on_event
        self._worker_command = tuple(worker_command)
        self._stop_ids = stop_ids
        self._owner = os.getpid()
        # Reentrant, as garbage collection anywhere may close an engine that nobody has any more.
        self._lock = threading.RLock()
        self._inbox: deque[Event | Future | Timer] = deque()
        self._timers = Timers()
        self._wake = -1
        self._woken = False
        self._begun: float | None = None
        self._open = False
        self._to_close = False
        self._waiting: dict[int, tuple[str, Callable[[SequenceResult], None]]] = {}  # by ticket, until finished
        self._watching: dict[int, Callable[[bytes], None]] = {}  # by ticket, those of _waiting whose text is read
        self._num_tickets = 0
        self._all_ready = threading.Event()
        self._thread: threading.Thread | None = None
        self._shell: Shell | None = None
        self._storage: Storage | None = None
        self._failure: EngineError | None = None
        self._final_stats: dict[str, Any] = {}
        _engines.add(self)

    # ---- for everybody ----

    def start(self) -> None:
        """Start the workers and return at once; sequences may be submitted while they load.

        Errors: ConfigError, ModelError, UnsupportedHostError or WorkerStartError when that is impossible.
        """
        self._check_owner()
        if self._begun is not None:
            raise EngineError("the engine has been started before")
        self._begun = time.monotonic()
        started: Future = Future()
        threading.Thread(target=self._run, args=(started,), name="coremill-engine", daemon=True).start()
        started.result()  # Ctrl-C here leaves a thread that goes on until close()

    @property
    def max_length(self) -> int:
        """Tokens of the longest request, prompt and completion; known once started."""
        return self._storage.max_length

    @property
    def failure(self) -> EngineError | None:
        """Why the engine could not go on, if that happened."""
        return self._failure

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Block until every worker is ready; False on timeout. EngineError when the engine failed instead."""
        self._check_owner()
        arrived = self._all_ready.wait(timeout)
        if self._failure is not None:
            raise self._failure
        return arrived

    def submit(self, request: SequenceRequest, on_done: Callable[[SequenceResult], None]) -> int:
        """Queue one sequence; on_done is called exactly once, also after cancel(), failures and close().

        Returns a ticket for cancel(). What is wrong with the request is said in its result (RequestError), as is
        the end of the engine (NOT_THE_REQUESTS_FAULT). EngineClosedError or EngineError when it has ended already.
        """
        self._check_owner()
        with self._lock:
            if not self._open:
                raise self._failure or EngineClosedError("the engine is closed")
            self._num_tickets += 1
            ticket = self._num_tickets
            self._waiting[ticket] = (request.key, on_done)
            self._post(Submitted(ticket, request))
        return ticket

    def watch(self, ticket: int, on_text: Callable[[bytes], None]) -> None:
        """Tell the sequence's text as it comes, from its beginning, before on_done: all but what comes with its last
        token. Bytes, as a token may end in the middle of a character. Too late is no error; once for each sequence."""
        self._check_owner()
        with self._lock:
            if self._open and ticket in self._waiting:
                self._watching[ticket] = on_text
                self._post(Watched(ticket))
                if ticket not in self._waiting:  # it has finished meanwhile
                    self._watching.pop(ticket, None)

    def call_at(self, when: float, call: Callable[[], None]) -> Timer:
        """Call it on the engine's thread at `when` (time.monotonic), if the engine still runs then."""
        self._check_owner()
        timer = Timer(when, call)
        with self._lock:
            if self._open:
                self._post(timer)
        return timer

    def cancel(self, ticket: int) -> None:
        """Stop a sequence within a step; its result carries RequestError "cancelled". Too late is no error."""
        self._check_owner()
        with self._lock:
            if self._open:
                self._post(Cancelled(ticket))

    def set_workers(self, count: int) -> None:
        """Run on the first `count` core groups from now on; returns at once.

        Sequences of workers that leave go on elsewhere within a step, and nothing is computed again. ConfigError unless
        1 <= count <= the number of groups.
        """
        self._check_owner()
        if not 1 <= count <= len(self.groups):
            raise ConfigError(f"workers is {count}: this engine has core groups for 1 to {len(self.groups)}")
        with self._lock:
            if not self._open:
                raise self._failure or EngineClosedError("the engine is closed")
            self._post(Workers(count))

    def pause(self, paused: bool = True) -> None:
        """All sequences rest, within a step, until pause(False); nothing is computed again. Returns at once."""
        self._check_owner()
        with self._lock:
            if not self._open:
                raise self._failure or EngineClosedError("the engine is closed")
            self._post(Paused(paused))

    def find(self, key: str) -> list[int]:
        """Tickets of the unfinished sequences whose request has this key."""
        return [ticket for ticket, (name, _) in list(self._waiting.items()) if name == key]

    def glance(self, max_rows: int = 0) -> dict[str, Any]:
        """What can be seen without asking anybody (see coordinator/figures.py); EngineError before start()."""
        with self._lock:  # the counters' pages stay mapped meanwhile
            if not self._open:
                raise self._failure or EngineClosedError("the engine is not running")
            return glance(self._shell, self._storage, self.config, max_rows)

    def stats(self, *, measure: bool = True) -> dict[str, Any]:
        """The queue, the arena and `workers`, a list with names that scripts rely on.

        Workers measure their memory between two steps; one that takes longer than 10 s is shown with its last
        figures. Without `measure` nobody is asked and nothing waits. After close(): the last state.
        """
        self._check_owner()
        measured: Future = Future()
        with self._lock:
            if measure and self._open and not self.is_own_thread:
                self._post(measured)
            else:
                measured.set_result(None)
        wait([measured], _STATS_TIMEOUT)
        with self._lock:
            return self._report() if self._open else self._final_stats

    def profiles(self) -> list[list[tuple[str, str, int, float]]]:
        """Per worker (label, kind, calls, seconds) of each operation of a step, as of the last stats()."""
        return self._shell.places.profiles() if self._shell else []

    def close(self, wait: bool = True) -> None:
        """Stop the workers, and wait until everything has ended; unfinished sequences end "engine_closed".

        A callback does not wait: it runs on the thread that does the work. In a forked child nothing happens: the
        engine is the parent's.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._to_close = True
            if self._open:
                self._post(Closing())
        if wait and self._thread is not None and not self.is_own_thread:
            self._thread.join()

    @property
    def is_own_thread(self) -> bool:
        """Whether this is called by a callback."""
        return threading.current_thread() is self._thread

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise EngineError(
                f"this engine belongs to process {self._owner}; process {os.getpid()} was forked from it and cannot "
                "use it: create it after the fork, or start processes with 'spawn'"
            )

    def _post(self, item: Event | Future | Timer) -> None:
        """Under the lock. The engine clears the flag before it looks into the inbox, so nothing is overlooked."""
        self._inbox.append(item)
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wake, 1)

    # ---- the engine's thread ----

    def _run(self, started: Future) -> None:
        # Workers are children of this thread, which outlives them: the kernel ends them with it.
        self._thread = threading.current_thread()
        try:
            self._set_up()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while self._shell.scheduler.closed is None:
                events = self._shell.sleep(self._timers.seconds_left(time.monotonic()))
                self._shell.advance(self._take_inbox() + events)
                for call in self._timers.due(time.monotonic()):
                    call_back("a timer", lambda call: call(), call)
                if not self._all_ready.is_set() and self._shell.all_ready:
                    self.startup_seconds = time.monotonic() - self._begun
                    self._all_ready.set()
        except BaseException as error:  # a bug: everybody who waits must hear of it
            self._failure = EngineError(f"the engine stopped: {type(error).__name__}: {error}")
            self._failure.__cause__ = error
        finally:
            self._shut_down()

    def _set_up(self) -> None:
        self._storage = Storage(self.pack_path, self.config, self.groups, self._stop_ids)
        try:
            self._shell = Shell(
                self._storage, self.config, self.groups, self._worker_command, self._finished, self._shown, self._tell
            )
        except BaseException:
            self._storage.close()
            raise
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._shell.watch(self._wake)
        with self._lock:
            self._open = True
            if self._to_close:  # already
                self._post(Closing())

    def _take_inbox(self) -> list[Event]:
        """What other threads have put there, in order."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        self._woken = False
        events = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Future):
                self._shell.measure(item)
            elif isinstance(item, Timer):
                self._timers.add(item)
            else:
                events.append(item)
        return events

    def _finished(self, ticket: int, result: SequenceResult) -> None:
        _, on_done = self._waiting.pop(ticket)
        self._watching.pop(ticket, None)
        call_back("on_done", on_done, result)

    def _shown(self, ticket: int, text: bytes) -> None:
        if (on_text := self._watching.get(ticket)) is not None:
            call_back("on_text", on_text, text)

    def _tell(self, event: dict[str, Any]) -> None:
        if self._on_event is not None:
            call_back("on_event", self._on_event, event)

    def _shut_down(self) -> None:
        self._failure = self._failure or self._shell.failure
        with self._lock:  # whoever comes now is refused; whoever came before is answered
            self._final_stats = self._report()
            self._open = False
        code, reason = "engine_closed", "the engine was closed before this request was done"
        if self._failure is not None:
            code, reason = "engine_failed", str(self._failure)
        for ticket, (key, _) in list(self._waiting.items()):
            self._finished(ticket, SequenceResult(key, error=RequestError(code, reason)))
        for item in self._inbox:
            if isinstance(item, Future):
                item.set_result(None)
        self._shell.close()
        self._storage.close()
        os.close(self._wake)
        self._all_ready.set()

    def _report(self) -> dict[str, Any]:
        return report(self._shell, self._storage, self.startup_seconds)


def _close_all() -> None:
    for engine in list(_engines):
        engine.close()


def _forget_all_in_child() -> None:
    for engine in list(_engines):
        if engine._shell is not None:
            engine._shell.pool.forget_in_child()


# Daemon threads are cut off at exit; workers and the socket folder must be gone before that.
atexit.register(_close_all)
# A forked child must not hold the workers' lifelines open when this process dies.
os.register_at_fork(after_in_child=_forget_all_in_child)
