"""A job of the queue while it runs: to the engine's side a job like any other, to its followers a text and an end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from coremill.config.joboptions import JobOptions
from coremill.config.request import GenerationRequest

if TYPE_CHECKING:
    from coremill.coordinator.python.job import Completion


class Follower(Protocol):
    """Whoever wants to know what comes of a job: a Job of this process, or a client's. `watched`: its text, too."""

    @property
    def watched(self) -> bool: ...
    def restart_text(self) -> None: ...
    def feed_text(self, data: bytes) -> None: ...
    def finish(self, outcome: Completion | Exception) -> None: ...


class Runner(Protocol):
    """What of a Backend runs errands: LocalBackend."""

    def begin(self, jobs: Any) -> None: ...
    def watch(self, job: Any) -> None: ...
    def cancel(self, job: Any) -> None: ...
    def close(self, wait: bool) -> None: ...


class Errand:
    """What LocalBackend needs of a job, see there. on_end: called once with the outcome, on any thread.

    Attributes:
        number: in the queue file. handle: the backend's.
    """

    def __init__(
        self,
        number: int,
        id: str,
        request: GenerationRequest,
        options: JobOptions,
        on_end: Callable[[Errand, Completion | Exception], None],
    ) -> None:
        self.number, self.id, self.request, self.options = number, id, request, options
        self.handle: Any = None
        self._on_end = on_end
        self._lock = threading.Lock()
        self._text: bytearray | None = None  # so far, once somebody watches
        self._watchers: list[Follower] = []
        self._ended = False
        self._callbacks: list[Callable[[Any], None]] = []

    @property
    def metadata(self) -> dict[str, str] | None:
        return self.request.metadata

    # ---- followers ----

    def watch(self, follower: Follower) -> bool:
        """Its text goes to this one too, from the beginning; once more, when it does already. True for the first: the
        engine must be told."""
        with self._lock:
            first = self._text is None
            if self._text is None:
                self._text = bytearray()
            if follower not in self._watchers:
                self._watchers.append(follower)
            follower.restart_text()
            follower.feed_text(bytes(self._text))
        return first

    def unwatch(self, follower: Follower) -> None:
        with self._lock:
            if follower in self._watchers:
                self._watchers.remove(follower)

    # ---- the backend ----

    @property
    def watched(self) -> bool:
        return self._text is not None

    def restart_text(self) -> None:
        with self._lock:
            if self._text:
                self._text.clear()
                for watcher in self._watchers:
                    watcher.restart_text()

    def feed_text(self, data: bytes) -> None:
        with self._lock:
            if self._text is not None:
                self._text += data
                for watcher in self._watchers:
                    watcher.feed_text(data)

    def done(self) -> bool:
        return self._ended

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def finish(self, outcome: Completion | Exception) -> None:
        if self.end():
            self._on_end(self, outcome)

    def end(self) -> bool:
        """Nothing more is wanted of it. False when that has been so before."""
        with self._lock:
            if self._ended:
                return False
            self._ended = True
        for callback in self._callbacks:
            callback(self)
        return True


def hand_over(runner: Runner, errands: Sequence[Errand]) -> None:
    """Begin them. One that is refused at once ends with that, as one does that is refused later."""
    alone = [[errand] for errand in errands if isinstance(errand.request.prompt, tuple)]
    texts = [errand for errand in errands if not isinstance(errand.request.prompt, tuple)]
    for part in (*alone, texts) if texts else alone:
        try:
            runner.begin(part)
        except Exception as error:
            for errand in part:
                errand.finish(error)
