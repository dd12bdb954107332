"""A submitted request, and what comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from coremill.config.joboptions import JobOptions
from coremill.config.request import GenerationRequest
from coremill.coordinator.callbacks import call_back
from coremill.coordinator.python.stream import TextStream
from coremill.coordinator.python.wake import Wake

if TYPE_CHECKING:
    from coremill.coordinator.python.sync import Coordinator


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a completion; the end-of-generation token counts as one."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a request waited, had its prompt read, and wrote; worker: who finished it."""

    queued_seconds: float
    prefill_seconds: float
    decode_seconds: float
    worker: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What a job comes to. finish_reason: "stop" (an end token or stop string) or "length" (max_tokens)."""

    custom_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    usage: Usage
    timing: Timing
    metadata: dict[str, str] | None = None


class Job(Future[Completion]):
    """A submitted request: a `concurrent.futures.Future` of its Completion that can be awaited, and iterated.

        job = coordinator.submit("The capital of France is", max_tokens=20)
        for piece in job:                  # text as it comes, cut between characters, never a stop string
            print(piece, end="", flush=True)
        print(job.result().usage)          # the whole, once it is done

    Under asyncio `await job` and `async for piece in job`. Any number of readers each get the whole text, also those
    who come late. Ctrl-C while one waits for a job cancels it, and so does cancelling a task that awaits it.

    `result` raises RequestError when the request failed (code "deadline_exceeded" when its time was over),
    EngineClosedError when the coordinator was closed before it was done, EngineError when the engine could not go on,
    CancelledError after cancel().

    Attributes:
        id: its name, unlike that of any other job. kept: it is found again by that (Coordinator.job) until it has been
            acknowledged; Ctrl-C does not cancel it.
        custom_id, metadata: as submitted; custom_id is "job-N" for jobs submitted without.
        request, options: what is asked, and how it is queued (priority, deadline, retries).
    """

    def __init__(
        self, coordinator: Coordinator, id: str, request: GenerationRequest, options: JobOptions, kept: bool = False
    ) -> None:
        super().__init__()
        self.id = id
        self.kept = kept
        self.request = request
        self.options = options
        self.handle: Any = None  # the backend's, whatever it wants to remember of the job
        self._coordinator = coordinator
        self._stream: TextStream | None = None
        self._ending = threading.Lock()  # whoever gets it ends the job

    @property
    def custom_id(self) -> str:
        return self.request.custom_id

    @property
    def metadata(self) -> dict[str, str] | None:
        return self.request.metadata

    @property
    def priority(self) -> int:
        return self.options.priority

    def cancel(self) -> bool:
        """Stop it: within one step if it is running, in a prompt within one chunk. False when it is done already."""
        self._coordinator._check_owner()
        first = self._ending.acquire(blocking=False)
        if first:
            self._coordinator._roster.leave(self)
        if not super().cancel():
            return False
        if first:
            self.set_running_or_notify_cancel()
            self._coordinator._backend.cancel(self)
        return True

    def acknowledge(self) -> None:
        """Its outcome is in safe hands and need not be kept any longer (Coordinator.acknowledge)."""
        self._coordinator.acknowledge(self)

    def result(self, timeout: float | None = None) -> Completion:
        """The Completion; TimeoutError when it takes longer than `timeout` seconds, which ends the waiting only."""
        with self._cancelled_by_ctrl_c():
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` would raise, None when it is a Completion. Waits and times out as that does."""
        with self._cancelled_by_ctrl_c():
            return super().exception(timeout)

    def __iter__(self) -> Iterator[str]:
        """Pieces of the text as they come; then whatever `result` raises, if it does. A slow reader gets fewer,
        longer ones."""
        stream, count, ended = self._watched(), 0, False
        while not ended:
            self._coordinator._check_owner()
            with self._cancelled_by_ctrl_c():
                stream.wait(count)
            pieces, ended = stream.after(count)
            count += len(pieces)
            if pieces:
                yield "".join(pieces)
        self.result()

    async def __aiter__(self) -> AsyncIterator[str]:
        """As __iter__, for `async for`."""
        stream, count, ended = self._watched(), 0, False
        news = Wake()
        stream.listen(news)
        try:
            while True:
                news.clear()
                pieces, ended = stream.after(count)
                count += len(pieces)
                if pieces:
                    yield "".join(pieces)
                if ended:
                    break
                if not pieces:
                    await news.wait()
        finally:
            stream.unlisten(news)
        self.result()

    def __await__(self) -> Generator[Any, None, Completion]:
        return asyncio.wrap_future(self).__await__()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Job belongs to the process that submitted it: pass its result(), or its id, on")

    @contextlib.contextmanager
    def _cancelled_by_ctrl_c(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self._interrupt()
            raise

    def _interrupt(self) -> None:
        """Ctrl-C: who has gone away may come back for a kept job."""
        if not self.kept:
            self.cancel()

    def _watched(self) -> TextStream:
        """Its stream, which costs something for every token and is there only once somebody reads."""
        self._coordinator._check_owner()
        with _making_streams:
            stream = self._stream
            if stream is not None:
                return stream
            stream = self._stream = TextStream()
        self._coordinator._backend.watch(self)
        self.add_done_callback(_end_stream)
        return stream

    # ---- for backends, on any thread ----

    @property
    def watched(self) -> bool:
        """Whether somebody reads its text as it comes."""
        return self._stream is not None

    def restart_text(self) -> None:
        """It is begun anew: feed_text follows from its beginning."""
        if self._stream is not None:
            self._stream.restart()

    def feed_text(self, data: bytes) -> None:
        """The next bytes of its text. Only for jobs that watch() was called for."""
        if self._stream is not None:
            self._stream.feed(data)

    def finish(self, outcome: Completion | Exception) -> None:
        """Its end; ignored when it has ended already. Callbacks that its owner has given it run now, on this thread."""
        if not self._ending.acquire(blocking=False):
            return
        self._coordinator._roster.leave(self)  # first: whoever sees it done may submit the next
        if not self.set_running_or_notify_cancel():
            return
        # Future itself catches what a callback raises, but not SystemExit and the like.
        finish: Callable[[Any], None] = self.set_exception if isinstance(outcome, Exception) else self.set_result
        call_back("a job's callback", finish, outcome)

    def _abandon(self) -> None:
        """It was never taken: give its place back."""
        if self._ending.acquire(blocking=False):
            self._coordinator._roster.leave(self)
            super().cancel()

    def _end_in_child(self, error: Exception) -> None:
        """After a fork. Locks may be held by threads that are not here, so all of them are new."""
        Future.__init__(self)
        self._ending = threading.Lock()
        self._ending.acquire()
        self._stream = None
        self.set_exception(error)


_making_streams = threading.Lock()


def _end_stream(job: Future[Completion]) -> None:
    assert isinstance(job, Job) and job._stream is not None
    failed = job.cancelled() or Future.exception(job) is not None
    job._stream.end(None if failed else Future.result(job).text)
