"""The queue at work: one thread that writes, begins and hands out, and one that tells.

    submit, cancel, acknowledge, ends of jobs --> [ inbox ] --one transaction for all that is there--> the file
                                                                     | committed
                             answers, followers, readers <-----------'------> the engine gets the next jobs

Nobody hears of anything before it is on the disk. While a commit waits for the disk the inbox fills, so many small jobs
share few commits. The engine has about `window` jobs of the queue at a time; the others wait in the file.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from coremill.config.errors import CoremillError, EngineError, RequestError
from coremill.coordinator.queue import rules
from coremill.coordinator.queue.errand import Errand, Follower, Runner, hand_over
from coremill.coordinator.queue.forms import outcome_form, to_json
from coremill.coordinator.queue.readers import Readers
from coremill.coordinator.queue.rules import Order
from coremill.coordinator.queue.store import BEGUN, DONE, WAITING, Row, Store
from coremill.coordinator.queue.teller import Teller
from coremill.coordinator.queue.writer import Writer, refuse

if TYPE_CHECKING:
    from coremill.coordinator.python.job import Completion

WINDOW = 1024
# Urgent jobs begun beyond the window at a time.
_URGENT = 64
_TIDY_S = 60.0


class _Turn(NamedTuple):
    """expired: jobs whose deadline has passed. num_settled: outcomes kept long enough; more: of them. begun: jobs."""

    expired: list[tuple[Row, RequestError]]
    num_settled: int
    more: bool
    begun: list[Row]


class Keeper:
    """Jobs of a store, run by a runner. Every method may be called from any thread and returns at once.

    Args:
        keep: seconds for which an outcome is kept that nobody acknowledges; None: for ever.

    It takes runner and store over: close() closes them.
    """

    def __init__(self, runner: Runner, store: Store, keep: float | None = None, window: int = WINDOW) -> None:
        self._runner, self._store, self._keep, self._window = runner, store, keep, window
        self._lock = threading.RLock()  # of the two below, which only the writer's thread changes
        self._errands: dict[str, Errand] = {}  # begun
        self._followers: dict[str, list[Follower]] = {}  # of unfinished jobs
        self._priorities: Counter[int] = Counter()  # of those begun
        self._orders: dict[str, Order] = {}  # accepted in this turn
        self._leaving: set[str] = set()  # begun jobs that end in this turn
        self._idle: list[Future[None]] = []
        self._readers = Readers(store)
        counts = store.counts()
        self._num_unfinished = counts.get(WAITING, 0) + counts.get(BEGUN, 0)
        self._num_done = counts.get(DONE, 0)
        self._next_tidy = 0.0
        self._has_deadlines = True
        self._teller = Teller()
        self._writer = Writer(store, self)
        self._writer.start()

    # ---- for everybody ----

    @property
    def is_own_thread(self) -> bool:
        return self._teller.is_own_thread or self._writer.is_own_thread

    def stats(self) -> dict[str, int]:
        """Jobs that wait in the file, that the engine has, and that are done but not acknowledged."""
        begun = len(self._errands)
        return {"waiting": max(0, self._num_unfinished - begun), "begun": begun, "done": self._num_done}

    def submit(self, orders: Sequence[Order]) -> Future[list[bool]]:
        """Accept all of these or none. The answer comes when they are on the disk: for each whether it is new.

        RequestError: "id_in_use" for an id that another request has, "job_settled" for one that has been acknowledged
        or cancelled.
        """
        return self._writer.post(lambda: self._accept(orders), lambda rows: self._accepted(orders, rows))

    def follow(self, id: str, follower: Callable[[Row], Follower]) -> Future[Follower]:
        """Tell a follower what comes of the job of this id; it is made by the keeper's thread, and the answer.
        RequestError "job_not_found" when there is no such job (any more)."""
        return self._writer.post(lambda: rules.find(self._store, id), lambda row: self._join(row, follower))

    def unfollow(self, id: str, follower: Follower) -> None:
        """It does not want to know any more."""
        with self._lock:
            if follower in (followers := self._followers.get(id, [])):
                followers.remove(follower)
            errand = self._errands.get(id)
        if errand is not None:
            errand.unwatch(follower)

    def watch(self, id: str, follower: Follower) -> None:
        """A follower wants the text as it comes, from now on: `watched` is true."""
        with self._lock:
            errand = self._errands.get(id)
        if errand is not None and errand.watch(follower):
            self._runner.watch(errand)

    def cancel(self, id: str) -> Future[None]:
        """Nobody wants it any more; its id is not run again. Too late is no error."""

        def forget() -> Row | None:
            self._leaving.add(id)
            return rules.forget(self._store, id)

        return self._writer.post(forget, self._cancelled)

    def acknowledge(self, ids: Sequence[str]) -> Future[None]:
        """Their outcomes are in safe hands: forget them, all or none. RequestError job_not_found, job_unfinished."""
        return self._writer.post(lambda: rules.acknowledge(self._store, ids), self._acknowledged)

    def claim(self, reader: str, limit: int) -> Future[list[Row]]:
        """Done jobs that nobody else has been given, as soon as there is at least one. They are this reader's until
        they are acknowledged, or it is released. The answer may be cancelled."""
        answer: Future[list[Row]] = Future()
        self._writer.post(then=lambda _: self._readers.ask(reader, limit, answer), answer=answer)
        return answer

    def caught_up(self) -> Future[None]:
        """Done when all that has been asked before has been looked at."""
        return self._writer.post()

    def release(self, reader: str) -> None:
        """The reader is gone: others get what it has not acknowledged."""
        with contextlib.suppress(EngineError):  # so is the queue
            self._writer.post(then=lambda _: self._readers.release(reader))

    def idle(self) -> Future[None]:
        """Done as soon as no job is unfinished."""
        answer: Future[None] = Future()
        self._writer.post(then=lambda _: self._idle.append(answer), answer=answer)
        return answer

    def close(self, wait: bool) -> None:
        """End the runner, write what has ended, close the store. Unfinished jobs stay in the file; their followers get
        EngineClosedError."""
        self._writer.close()
        if wait and not self.is_own_thread:
            self._writer.join()
            self._teller.join()

    # ---- in the transaction ----

    def in_transaction(self) -> _Turn:
        expired = rules.expire(self._store) if self._has_deadlines else []
        num_settled, more = self._tidy()
        return _Turn(expired, num_settled, more, self._take_next())

    def _accept(self, orders: Sequence[Order]) -> list[Row | None]:
        rows = rules.accept(self._store, orders)
        self._orders.update((order.id, order) for order, row in zip(orders, rows, strict=True) if row is None)
        self._has_deadlines |= any(order.options.deadline is not None for order in orders)
        return rows

    def _tidy(self) -> tuple[int, bool]:
        now = time.time()
        if now < self._next_tidy:
            return 0, False
        num_settled, more = self._store.tidy(now, self._keep)
        if not more:
            self._next_tidy = now + (_TIDY_S if self._keep is None else min(_TIDY_S, max(self._keep, 1.0)))
        return num_settled, more

    def _take_next(self) -> list[Row]:
        if self._writer.failure is not None or self._writer.closing:
            return []
        room = self._window - len(self._errands) + len(self._errands.keys() & self._leaving)
        if room > 0:
            return self._store.begin(room)
        highest = self._store.highest_waiting()
        if highest is None or highest <= min(self._priorities):
            return []
        # As if those of lower priorities were not there: for each priority a window.
        room = self._window - sum(count for priority, count in self._priorities.items() if priority >= highest)
        leaving = self._errands.keys() & self._leaving
        room += sum(self._errands[id].options.priority >= highest for id in leaving)
        return self._store.begin(min(room, _URGENT), above=highest - 1) if room > 0 else []

    # ---- once it is on the disk ----

    def committed(self, turn: _Turn) -> float:
        for row, error in turn.expired:
            self._ended(row.id, error)
        self._num_done -= turn.num_settled
        self._begin(turn.begun)
        self._orders.clear()
        self._leaving.clear()
        self._readers.serve()
        self._tell_idle()
        if self._writer.failure is not None:  # those who asked in the turn that brought it must hear of it, too
            self._lost(self._writer.failure)
        if turn.more:
            return 0.0
        deadline = self._store.next_deadline() if self._has_deadlines else None
        self._has_deadlines = deadline is not None
        return max(0.0, min(self._next_tidy, deadline or self._next_tidy) - time.time())

    def _accepted(self, orders: Sequence[Order], rows: Sequence[Row | None]) -> list[bool]:
        for order, row in zip(orders, rows, strict=True):
            if row is None:
                self._num_unfinished += 1
            if order.follower is not None and (row is None or row.state != DONE):
                self._join_unfinished(order.id, order.follower)
            elif order.follower is not None and row is not None:
                self._teller.tell(order.follower.finish, self.outcome(row))
        return [row is None for row in rows]

    def _join(self, row: Row, make: Callable[[Row], Follower]) -> Follower:
        try:
            follower = make(row)
        except Exception as error:
            raise self.damaged(row, error) from None
        if row.state == DONE:
            self._teller.tell(follower.finish, self.outcome(row))
        else:
            self._join_unfinished(row.id, follower)
        return follower

    def _join_unfinished(self, id: str, follower: Follower) -> None:
        with self._lock:
            self._followers.setdefault(id, []).append(follower)
        if follower.watched:
            self.watch(id, follower)

    def outcome(self, row: Row) -> Completion | Exception:
        """What came of a done job."""
        try:
            return rules.outcome(row)
        except Exception as error:
            return self.damaged(row, error)

    def damaged(self, row: Row, error: Exception) -> RequestError:
        """Of a row that holds something else than what has been written."""
        problem = f"job {row.id!r} cannot be read ({type(error).__name__}: {error}); cancel() forgets it"
        return RequestError("damaged", f"{self._store.path}: {problem}", "id")

    def _begin(self, rows: Sequence[Row]) -> None:
        errands = []
        for row in rows:
            try:
                order = self._orders.get(row.id)
                request, options = rules.asked(row) if order is None else (order.request, order.options)
            except Exception as error:
                self._over(row.id, row.number, self.damaged(row, error))
                continue
            errand = Errand(row.number, row.id, request, options, self._on_end)
            with self._lock:
                self._errands[row.id] = errand
                self._priorities[options.priority] += 1
                for follower in self._followers.get(row.id, ()):
                    if follower.watched:
                        errand.watch(follower)
            errands.append(errand)
        hand_over(self._runner, errands)

    def _on_end(self, errand: Errand, outcome: Completion | Exception) -> None:
        """On whatever thread the errand ended."""
        if isinstance(outcome, EngineError):  # no fault of its own: it will be run by the next coordinator
            error = outcome
            self._writer.post(then=lambda _: self._lost(error), must=True)
            return
        if isinstance(outcome, Exception) and not isinstance(outcome, RequestError):
            outcome = RequestError("internal_error", f"{type(outcome).__name__}: {outcome}")
        self._over(errand.id, errand.number, outcome)

    def _over(self, id: str, number: int, outcome: Completion | RequestError) -> None:
        text = to_json(outcome_form(outcome))

        def write() -> bool:
            """False: it has been cancelled meanwhile."""
            self._leaving.add(id)
            return self._store.end(number, text, time.time())

        self._writer.post(write, lambda ended: self._ended(id, outcome) if ended else None, must=True)

    def _ended(self, id: str, outcome: Completion | RequestError) -> None:
        self._leave(id)
        self._num_done += 1
        self._tell_followers(id, outcome)

    def _leave(self, id: str) -> Errand | None:
        """It is unfinished no more."""
        self._num_unfinished -= 1
        with self._lock:
            errand = self._errands.pop(id, None)
        if errand is not None:
            self._priorities[errand.options.priority] -= 1
            if not self._priorities[errand.options.priority]:
                del self._priorities[errand.options.priority]
        return errand

    def _tell_followers(self, id: str, outcome: Completion | Exception) -> None:
        with self._lock:
            followers = self._followers.pop(id, [])
        for follower in followers:
            self._teller.tell(follower.finish, outcome)

    def _cancelled(self, row: Row | None) -> None:
        if row is None:
            return
        if row.state == DONE:
            self._acknowledged([row.id])
            return
        errand = self._leave(row.id)
        if errand is not None and errand.end():
            self._runner.cancel(errand)
        self._tell_followers(row.id, RequestError("cancelled", f"job {row.id!r} was cancelled"))

    def _acknowledged(self, ids: Sequence[str]) -> None:
        self._num_done -= len(ids)
        self._readers.forget(ids)

    def _tell_idle(self) -> None:
        if self._idle and not self._num_unfinished:
            idle, self._idle = self._idle, []
            for answer in idle:
                if answer.set_running_or_notify_cancel():
                    answer.set_result(None)

    # ---- the end ----

    def end(self) -> None:
        self._runner.close(True)

    def failed(self, error: CoremillError) -> None:
        self._lost(error)
        self._teller.end()

    def _lost(self, error: CoremillError) -> None:
        """Nothing more will be done. The jobs stay in the file."""
        self._writer.failure = self._writer.failure or error
        with self._lock:
            followers, self._followers = self._followers, {}
        for follower in (follower for those in followers.values() for follower in those):
            self._teller.tell(follower.finish, error)
        self._readers.close(error)
        for answer in self._idle:
            refuse(answer, error)
        self._idle.clear()
