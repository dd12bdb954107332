"""What one attached client follows. Its news wait here until it asks for them, as much as it can take."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from coremill.config.errors import RequestError
from coremill.coordinator.local_socket.wire import error_fields
from coremill.coordinator.python.job import Completion
from coremill.coordinator.queue.errand import Errand
from coremill.coordinator.queue.forms import outcome_form

# Of one answer; what is over comes with the next.
_MAX_NEWS, _MAX_TEXT = 1000, 1 << 20


def outcome_fields(outcome: Completion | Exception) -> dict[str, Any]:
    """{"outcome": form}, or {"failure": error} for what is no outcome of the job's own."""
    if isinstance(outcome, Exception) and not isinstance(outcome, RequestError):
        return {"failure": error_fields(outcome)}
    return {"outcome": outcome_form(outcome)}


class Seat:
    """A client's place at a job: a Follower (coordinator/queue/errand.py). Quiet until open(), as the client must have
    heard that it has it first. errand: of a job that is not kept, and ends with the client."""

    def __init__(self, session: Session, id: str, watched: bool, errand: Errand | None = None) -> None:
        self.id, self.watched, self.errand = id, watched, errand
        self._session = session
        self._is_open = False
        self.text = bytearray()  # not sent yet
        self.restarted = False
        self.outcome: Completion | Exception | None = None

    def open(self) -> None:
        with self._session.lock:
            self._is_open = True
            if self.restarted or self.text or self.outcome is not None:
                self._session.changed(self)

    def restart_text(self) -> None:
        with self._session.lock:
            self.text.clear()
            self.restarted = True
            self._tell()

    def feed_text(self, data: bytes) -> None:
        with self._session.lock:
            self.text += data
            self._tell()

    def finish(self, outcome: Completion | Exception) -> None:
        with self._session.lock:
            self.outcome = outcome
            self._tell()

    def _tell(self) -> None:
        if self._is_open:
            self._session.changed(self)

    def take(self) -> list[Any]:
        """[id, whether its text begins anew, more of it, outcome fields or nil]; under the session's lock."""
        news = [self.id, self.restarted, bytes(self.text), None]
        if self.outcome is not None:
            news[3] = outcome_fields(self.outcome)
        self.text.clear()
        self.restarted = False
        return news


class Session:
    """One client, as long as its connection lives."""

    def __init__(self, client: bytes) -> None:
        self.client = client
        self.lock = threading.RLock()
        self.seats: dict[str, Seat] = {}
        self.readers: dict[str, Future[Any] | None] = {}  # with the claim that is open
        self.gone = False
        self._changed: dict[str, Seat] = {}
        self._asking: Future[list[Any]] | None = None

    def changed(self, seat: Seat) -> None:
        """There is news of it. Under the lock."""
        if not self.gone:
            self._changed[seat.id] = seat
            self._answer()

    def ask(self) -> Future[list[Any]]:
        """The next news, at least one, as soon as there are any."""
        with self.lock:
            if self._asking is not None:
                raise RequestError("invalid_call", "the news are asked for already")
            asking = self._asking = Future()
            self._answer()
        return asking

    def _answer(self) -> None:
        if self._asking is None or not self._changed:
            return
        asking, self._asking = self._asking, None
        news: list[Any] = []
        num_bytes = 0
        while self._changed and len(news) < _MAX_NEWS and num_bytes < _MAX_TEXT:
            id = next(iter(self._changed))
            seat = self._changed.pop(id)
            num_bytes += len(seat.text)
            if isinstance(seat.outcome, Completion):
                num_bytes += len(seat.outcome.text) + 8 * len(seat.outcome.token_ids)
            news.append(seat.take())
            if seat.outcome is not None and self.seats.get(id) is seat:
                del self.seats[id]
        asking.set_result(news)
