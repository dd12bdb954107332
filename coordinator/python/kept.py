"""Jobs that are kept: found again by their ids, read by whoever comes, forgotten once they are acknowledged."""

from __future__ import annotations

import secrets
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, cast

from coremill.config.errors import QueueFullError, RequestError
from coremill.config.joboptions import JobOptions
from coremill.config.request import GenerationRequest
from coremill.config.request_fields import check_text, shown
from coremill.coordinator.python.asking import defaults_of, request_of_row
from coremill.coordinator.python.job import Completion, Job

if TYPE_CHECKING:
    from coremill.coordinator.python.roster import Roster
    from coremill.coordinator.python.sync import Coordinator

MAX_ID_CHARS = 1024
# Jobs that submit_all hands over at a time, and outcomes that a reader asks for.
_CHUNK = 1000
_AHEAD = 64


class Keeping(Protocol):
    """What a Backend has beside the rest when its `keeps_jobs` is true."""

    keeps_jobs: bool
    is_durable: bool

    @property
    def is_own_thread(self) -> bool: ...
    def new_id(self) -> str: ...
    def begin(self, jobs: Sequence[Job]) -> None: ...

    def follow(self, id: str, make: Callable[[GenerationRequest, JobOptions], Job]) -> Future[Job]:
        """The job of this id, made of what it asks. It is finished as those of begin() are."""
        ...

    def acknowledge(self, ids: Sequence[str]) -> Future[None]: ...

    def claim(self, reader: str, limit: int, timeout: float | None) -> list[Any]:
        """Outcomes for a reader, at least one; [] when none has come within `timeout` seconds."""
        ...

    def read(self, claimed: Any) -> tuple[str, GenerationRequest, JobOptions, Completion | Exception]:
        """One of them: id, what was asked, how, and what came of it."""
        ...

    def release(self, reader: str) -> None:
        """Others get what it has not acknowledged."""
        ...


def check_id(value: Any) -> str:
    """A job's id: a text of 1 to 1024 characters."""
    return check_text(value, "id", max_chars=MAX_ID_CHARS, empty=False)


class KeptJobs:
    """What a Coordinator does with jobs by their ids."""

    _backend: Any
    _roster: Roster

    _check_owner: Callable[[], None]

    @property
    def _keeping(self) -> Keeping:
        self._check_owner()
        if not self._backend.keeps_jobs:
            problem = "this coordinator keeps no jobs: make it with queue=..., or attach to one (`coremill up`)"
            raise RequestError("no_queue", problem, "id")
        return cast(Keeping, self._backend)

    def _is_kept(self, id: Any) -> bool:
        """Whether a job submitted with this id, None for without, is kept. RequestError when the id cannot be one."""
        if id is not None:
            check_id(id)
            return self._keeping.keeps_jobs
        return self._backend.is_durable

    def job(self, id: str) -> Job:
        """The job of this id, whoever submitted it, unfinished or done. RequestError "job_not_found" when there is
        none, or when it has been acknowledged.

            answer = c.job("order-17").result()
        """
        backend = self._keeping

        def make(request: GenerationRequest, options: JobOptions) -> Job:
            self._roster.adopt()
            job = Job(cast("Coordinator", self), id, request, options, kept=True)
            self._roster.sign(job)
            return job

        return backend.follow(check_id(id), make).result()

    def submit_all(
        self,
        rows: Iterable[Any],
        *,
        chat: bool = False,
        system: str | None = None,
        wait: bool | float = True,
        **fields: Any,
    ) -> list[Job]:
        """Submit many requests, with one write to a durable queue for a thousand of them.

            c.submit_all({"id": f"order-{n}", "prompt": text} for n, text in orders)

        Args:
            rows: as of map(); a mapping may have an `id`, too.
            chat, system, fields: as of map(). wait: as of submit().

        RequestError when one is wrong: then none has been submitted. When an id is in use by another request, or the
        queue is full, the thousands before have been.
        """
        self._check_owner()
        defaults = defaults_of(fields, chat, system, None)
        asked = []
        for number, row in enumerate(rows, 1):
            id = row.get("id") if isinstance(row, Mapping) else None
            kept = self._is_kept(id)
            if isinstance(row, Mapping):
                row = {name: value for name, value in row.items() if name != "id"}
                row.setdefault("custom_id", id)
            request, options = request_of_row(row, number, defaults)
            asked.append((id or self._backend.new_id(), request, options, kept))
        jobs: list[Job] = []
        chunk: list[Job] = []
        for id, request, options, kept in asked:
            try:
                self._roster.enter(False)
            except QueueFullError:
                self._hand_over(chunk, jobs)
                self._roster.enter(False if self._backend.is_own_thread else wait)
            job = Job(cast("Coordinator", self), id, request, options, kept=kept)
            self._roster.sign(job)
            chunk.append(job)
            if len(chunk) == _CHUNK:
                self._hand_over(chunk, jobs)
        self._hand_over(chunk, jobs)
        return jobs

    def _hand_over(self, chunk: list[Job], jobs: list[Job]) -> None:
        try:
            self._backend.begin(chunk)
        except BaseException:
            for job in chunk:
                job._abandon()
            raise
        jobs += chunk
        chunk.clear()

    def results(self, timeout: float | None = None) -> KeptResults:
        """Kept jobs that are done, as they end, whoever submitted them. Each goes to one reader, which acknowledges it;
        when the reader is gone without, it goes to another.

            for job in c.results(timeout=60):
                store(job.id, job.result())
                job.acknowledge()

        timeout: the iteration ends when none has come for so many seconds; None: never, 0: with those that are there.
        """
        return KeptResults(self, self._keeping, timeout)

    def acknowledge(self, *jobs: Job | str) -> None:
        """These outcomes, of jobs or ids, are in safe hands and are forgotten; that is on the disk when it returns. All
        or none: RequestError "job_not_found", "job_unfinished". Once more is no error."""
        ids = []
        for job in jobs:
            if isinstance(job, Job) and not job.kept:
                raise RequestError(
                    "not_kept", f"job {shown(job.id)} is not kept: there is nothing to acknowledge", "id"
                )
            ids.append(job.id if isinstance(job, Job) else check_id(job))
        self._keeping.acknowledge(ids).result()


class KeptResults(Iterator[Job]):
    """Done jobs, as results() gives them. What has been given out and not acknowledged goes to other readers after
    close(), at the end of a `with` block, and when nobody refers to it any more."""

    def __init__(self, coordinator: KeptJobs, backend: Keeping, timeout: float | None) -> None:
        self._coordinator, self._backend, self._timeout = coordinator, backend, timeout
        self._reader = secrets.token_hex(8)
        self._claimed: deque[Any] = deque()
        self._close = weakref.finalize(self, backend.release, self._reader)
        self._close.atexit = False

    def fetch(self, timeout: float | None) -> bool:
        """Wait for the next; False when there is none within `timeout` seconds."""
        self._coordinator._check_owner()
        if not self._claimed and self._close.alive:
            self._claimed.extend(self._backend.claim(self._reader, _AHEAD, timeout))
            if not self._close.alive:  # by another thread meanwhile
                self._backend.release(self._reader)
                self._claimed.clear()
        return bool(self._claimed)

    def take(self) -> Job:
        """The next of those that are there."""
        id, request, options, outcome = self._backend.read(self._claimed.popleft())
        job = Job(cast("Coordinator", self._coordinator), id, request, options, kept=True)
        job.finish(outcome)
        return job

    def __next__(self) -> Job:
        if not self.fetch(self._timeout):
            raise StopIteration
        return self.take()

    def close(self) -> None:
        self._claimed.clear()
        self._close()

    def __enter__(self) -> KeptResults:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
