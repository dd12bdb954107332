"""map: rows in, results out, and a window of them on their way.

    a thread or a task --offer--> [ jobs of the coordinator ] --ends--> [ finished ] --take--> the caller
              ^                                                                          |
              '------------------- room: rows taken in and not yet given out < window ---'

What is here knows neither threads nor event loops; feeders.py fills it, results.py empties it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from coremill.config.errors import RequestError
from coremill.config.joboptions import JobOptions
from coremill.config.request import GenerationRequest, SamplingParams, check_sampling
from coremill.coordinator.python.asking import Defaults, request_of_row
from coremill.coordinator.python.job import Completion, Job

if TYPE_CHECKING:
    from coremill.coordinator.python.sync import Coordinator

Errors = Literal["raise", "return"]


class Reject(Exception):
    """Raised by an output hook: the row has failed, for this reason (RequestError "rejected")."""


class Retry(Exception):
    """Raised by an output hook: run the row again, up to `retries` times, then it is rejected for this reason.

    Each time draws other random numbers; fields (temperature=1.2, max_tokens=200, ...) replace the row's from then on.
    """

    def __init__(self, reason: str, **fields: Any) -> None:
        super().__init__(reason)
        self.fields = fields


@dataclass(frozen=True, slots=True)
class Result(Completion):
    """A Completion of map(). index: of its row, from 0; row: as it was given; value: what the output hook returned."""

    index: int = 0
    row: Any = None
    value: Any = None
    error: None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """What map(errors="return") gives for a row that failed."""

    custom_id: str
    error: RequestError
    metadata: dict[str, str] | None = None
    index: int = 0
    row: Any = None


@dataclass(eq=False, slots=True)
class Entry:
    """A row on its way. error: why it never became a job. retries: how often the hook has sent it back."""

    index: int
    row: Any
    request: GenerationRequest | None = None
    options: JobOptions = field(default_factory=JobOptions)
    error: Exception | None = None
    job: Job | None = None
    retries: int = 0

    @property
    def custom_id(self) -> str:
        return f"line-{self.index + 1}" if self.request is None else self.request.custom_id


class Flow:
    """One map(). Any thread may call anything; listeners are called on any thread and must be quick."""

    def __init__(self, coordinator: Coordinator, defaults: Defaults, window: int, ordered: bool, retries: int) -> None:
        self.coordinator, self.window = coordinator, window
        self._defaults, self._ordered, self._retries = defaults, ordered, retries
        self._changed = threading.Condition(threading.RLock())
        self._listeners: list[Callable[[], None]] = []
        self._num_taken_in = self._num_given_out = 0
        self._running: dict[int, Entry] = {}
        self._finished: deque[Entry] = deque()  # unless ordered
        self._in_turn: dict[int, Entry] = {}  # finished, by index
        self._ended = self._closed = False
        self._owner = os.getpid()
        self._error: BaseException | None = None

    # ---- whoever fills it: one thread or task ----

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def has_room(self) -> bool:
        """Whether a row may be taken from the input. True also once closed, when nobody will."""
        return self._closed or self._num_taken_in - self._num_given_out < self.window

    def wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.has_room)

    def take_in(self, row: Any) -> Entry | None:
        """The next row of the input, to be begun once there is a place for it; None when it has failed already."""
        entry = Entry(self._num_taken_in, row)
        with self._changed:
            self._num_taken_in += 1
            self._running[entry.index] = entry
        try:
            entry.request, entry.options = request_of_row(row, entry.index + 1, self._defaults)
        except RequestError as error:
            self.fail(entry, error)
            return None
        return entry

    def begin(self, entry: Entry) -> None:
        """In a place of the roster that has been taken for it."""
        assert entry.request is not None
        if self._closed:
            self.coordinator._roster.give_back()
            return
        try:
            job = self.coordinator._begin(entry.request, entry.options)
        except Exception as error:
            self.fail(entry, error)
            return
        with self._changed:
            entry.job = job
        job.add_done_callback(lambda _: self._end(entry))
        if self._closed:  # meanwhile
            job.cancel()

    def fail(self, entry: Entry, error: Exception) -> None:
        """It has not become a job."""
        entry.error = error
        self._end(entry)

    def end_input(self, error: BaseException | None = None) -> None:
        """No further row will come; error: which the caller gets after the results of the rows before."""
        with self._changed:
            self._ended, self._error = True, error
            self._tell()

    def _end(self, entry: Entry) -> None:
        with self._changed:
            if self._ordered:
                self._in_turn[entry.index] = entry
            else:
                self._finished.append(entry)
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()

    # ---- whoever empties it ----

    def take(self) -> Entry | None:
        """A finished row, which stays in the window until settle(); None when there is none just now."""
        with self._changed:
            if self._closed:
                return None
            if self._ordered:
                return self._in_turn.pop(self._num_given_out, None)
            return self._finished.popleft() if self._finished else None

    @property
    def is_done(self) -> bool:
        """Whether no further row will be finished."""
        return self._closed or (self._ended and self._num_given_out == self._num_taken_in)

    def check_input(self) -> None:
        """At the end: raise what the input raised, once."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> Entry | None:
        """The next finished row; None at the end."""
        with self._changed:
            while True:
                entry = self.take()
                if entry is not None or self.is_done:
                    return entry
                self._changed.wait()

    def settle(self, entry: Entry) -> None:
        """The caller has what came of it."""
        with self._changed:
            del self._running[entry.index]
            self._num_given_out += 1
            self._tell()

    def listen(self, listener: Callable[[], None]) -> None:
        with self._changed:
            self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        with self._changed:
            self._listeners.remove(listener)

    def outcome(self, entry: Entry) -> Result | RequestError:
        """What came of a finished row, before any hook. Raises what is no fault of the row."""
        error = entry.error
        if error is None:
            assert entry.job is not None
            if entry.job.cancelled():
                raise CancelledError(f"row {entry.index + 1}, {entry.custom_id!r}, was cancelled")
            error = Future.exception(entry.job)  # type: ignore[assignment]
        if error is None:
            assert entry.job is not None
            done = Future.result(entry.job)
            fields = {name: getattr(done, name) for name in Completion.__dataclass_fields__}
            return Result(**fields, index=entry.index, row=entry.row)
        if isinstance(error, RequestError):
            return error
        raise error

    def failure(self, entry: Entry, error: RequestError) -> Failure:
        metadata = None if entry.request is None else entry.request.metadata
        return Failure(entry.custom_id, error, metadata, entry.index, entry.row)

    def judge(self, entry: Entry, verdict: Reject | Retry) -> RequestError | None:
        """What a hook has said of a row: why it has failed, or None when it is to be begun again."""
        if isinstance(verdict, Reject) or entry.retries >= self._retries:
            after = f" after {entry.retries} retries" if entry.retries or isinstance(verdict, Retry) else ""
            return RequestError("rejected", f"{entry.custom_id!r} was rejected{after}: {verdict}")
        assert entry.request is not None
        entry.retries += 1
        entry.options = replace(entry.options, attempt=entry.retries)
        entry.request = replace(entry.request, sampling=_changed(entry.request.sampling, verdict.fields))
        return None

    def close(self) -> None:
        """Nothing more is taken in or given out; jobs under way are cancelled."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            running = list(self._running.values())
            self._tell()
        for entry in running:
            if entry.job is not None:
                entry.job.cancel()


def _changed(sampling: SamplingParams, fields: Mapping[str, Any]) -> SamplingParams:
    unknown = sorted(fields.keys() - SamplingParams.__dataclass_fields__.keys())
    if unknown:
        raise TypeError(f"Retry(): {unknown[0]!r} is not a field that a retry can change")
    return check_sampling(fields, sampling)
