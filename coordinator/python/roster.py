"""Who is unfinished, how many may be, and who waits for room."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

from coremill.config.errors import QueueFullError

if TYPE_CHECKING:
    from coremill.coordinator.python.job import Job


class Roster:
    """The unfinished jobs of a coordinator. limit: most of them at a time, None: any number.

        place = enter() ... sign(job) ... leave(job)

    A place that is left goes to whoever has waited longest.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        # Reentrant, as a signal handler may submit or cancel in the middle of anything here.
        self._lock = threading.RLock()
        self._taken = 0
        self._jobs: dict[Job, None] = {}
        self._waiting: deque[Future[None]] = deque()
        self._watching: list[Future[None]] = []

    @property
    def num_unfinished(self) -> int:
        return self._taken

    def jobs(self) -> list[Job]:
        return list(self._jobs)

    def enter(self, wait: bool | float = True) -> None:
        """Take a place for a job. wait: True until there is one, False not at all, or at most so many seconds.
        QueueFullError without one; EngineClosedError when the roster is closed meanwhile."""
        place = self.ask()
        if place is None:
            return
        timeout = None if wait is True else float(wait)
        try:
            place.result(timeout)
        except TimeoutError:
            if self._withdraw(place):
                raise self.full(wait) from None
        except KeyboardInterrupt:
            self.decline(place)
            raise

    def ask(self) -> Future[None] | None:
        """None: a place has been taken. Else a future that is done when one has been; decline() it to go away."""
        with self._lock:
            if self.limit is None or self._taken < self.limit:
                self._taken += 1
                return None
            place: Future[None] = Future()
            self._waiting.append(place)
            return place

    def decline(self, place: Future[None]) -> None:
        """Whoever asked for it has gone away, and may have got it at the same moment."""
        if not self._withdraw(place):
            place.add_done_callback(lambda place: None if place.exception() else self.give_back())

    def _withdraw(self, place: Future[None]) -> bool:
        """False when it has got the place meanwhile."""
        with self._lock:
            if place in self._waiting:
                self._waiting.remove(place)
        return place.cancel()

    def full(self, waited: bool | float) -> QueueFullError:
        after = f" after {waited:g} s" if waited else ""
        return QueueFullError(f"the queue is full{after}: max_queue is {self.limit} unfinished jobs")

    def adopt(self) -> None:
        """A place for a job that has been queued before, beyond the limit if need be."""
        with self._lock:
            self._taken += 1

    def sign(self, job: Job) -> None:
        """The job that a place was taken for."""
        with self._lock:
            self._jobs[job] = None

    def leave(self, job: Job) -> None:
        """It has ended."""
        with self._lock:
            known = self._jobs.pop(job, job) is None
        if known:
            self.give_back()

    def give_back(self) -> None:
        """A place that is not needed any more."""
        while True:
            with self._lock:
                heir = self._waiting.popleft() if self._waiting else None
                if heir is None:
                    self._taken -= 1
                    told = [] if self._taken else self._watching
                    self._watching = self._watching if self._taken else []
                    break
            if heir.set_running_or_notify_cancel():
                heir.set_result(None)
                return
        for watcher in told:
            if watcher.set_running_or_notify_cancel():
                watcher.set_result(None)

    def idle(self) -> Future[None]:
        """Done as soon as nobody is unfinished."""
        watcher: Future[None] = Future()
        with self._lock:
            if self._taken:
                self._watching.append(watcher)
                return watcher
        watcher.set_result(None)
        return watcher

    def close(self, error: Exception) -> None:
        """Whoever waits for a place gets this error."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        for place in waiting:
            if place.set_running_or_notify_cancel():
                place.set_exception(error)
