"""What a Coordinator asks of whoever runs its jobs: an engine of this process, or one elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from coremill.coordinator.python.job import Job
    from coremill.coordinator.text.requests import TextRequest


class Backend(Protocol):
    """Every method may be called from any thread; none may call a user's function while it holds a lock.

    For each job of begin(), job.finish(outcome) must be called once, from any thread, with a Completion or an
    exception, unless the job is cancelled; and for each job of watch(), job.feed_text(bytes) with its text from the
    beginning, in order, all of it before finish(), where the last part may be left out.

    Attributes:
        num_slots: sequences that run at a time, on all workers.
        model_names: what a request may give in `model`.
        keeps_jobs: whether jobs may be kept, by their ids (Keeping in kept.py). is_durable: all jobs of submit() are.
        begin_waits: begin() waits for another process, also for jobs that are not kept.
        is_own_thread: whether this is called by a thread that the jobs depend on, which must not wait for them.
    """

    keeps_jobs: bool
    is_durable: bool
    begin_waits: bool

    @property
    def num_slots(self) -> int: ...
    @property
    def model_names(self) -> frozenset[str]: ...
    @property
    def is_own_thread(self) -> bool: ...

    def new_id(self) -> str:
        """A name for a job, unlike any other's."""
        ...

    def begin(self, jobs: Sequence[Job]) -> None:
        """Take these jobs. EngineClosedError or EngineError when that is impossible: then none of them is."""
        ...

    def watch(self, job: Job) -> None:
        """Somebody reads its text as it comes. Called at most once, after begin() or while it runs."""
        ...

    def cancel(self, job: Job) -> None:
        """Nobody wants it any more. It may have ended meanwhile."""
        ...

    def count_tokens(self, requests: Sequence[TextRequest]) -> Future[list[Any]]:
        """For each request the number of its tokens, or a RequestError."""
        ...

    def render(self, requests: Sequence[TextRequest]) -> Future[list[Any]]:
        """For each request the text of its chat, or a RequestError."""
        ...

    def idle(self) -> Future[None]:
        """Done as soon as no kept job is unfinished, whoever submitted it."""
        ...

    def stats(self) -> dict[str, Any]: ...
    def set_workers(self, count: int) -> None: ...
    def wait_ready(self, timeout: float | None) -> bool: ...

    def close(self, wait: bool) -> None:
        """Unfinished jobs finish with EngineClosedError. wait: until everything has ended."""
        ...
