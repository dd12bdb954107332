"""A Coordinator's jobs through a queue: kept ones go by the keeper, the rest straight to the engine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from coremill.config.engine import EngineConfig
from coremill.config.errors import EngineError, ResumeRefusedError
from coremill.config.fingerprint import system_fingerprint
from coremill.config.joboptions import JobOptions
from coremill.config.request import GenerationRequest
from coremill.coordinator.python.local import LocalBackend
from coremill.coordinator.queue import rules
from coremill.coordinator.queue.errand import Follower
from coremill.coordinator.queue.keeper import Keeper
from coremill.coordinator.queue.rules import Order
from coremill.coordinator.queue.store import Row, Store

if TYPE_CHECKING:
    from coremill.coordinator.python.job import Completion, Job
    from coremill.coordinator.text.requests import TextRequest
    from coremill.native.packer import Progress

# How what the tokens of a job depend on is called in front of people.
_NAMES = {"fingerprint": "the system fingerprint (model, --kv, numerics version)", "seed": "--seed", "ctx": "--ctx"}


class QueueBackend:
    """See Backend; its jobs of `kept` are in the queue.

    Attributes:
        keeps_jobs: jobs may have ids, by which they are found again.
        is_durable: all jobs of submit() are kept, and outlive this process.
    """

    keeps_jobs = True
    begin_waits = False  # for kept jobs it does, as is_durable and ids say

    def __init__(
        self,
        model: str | os.PathLike[str],
        config: EngineConfig,
        on_event: Callable[[dict[str, Any]], None] | None,
        queue: str | os.PathLike[str] | None,
        keep: float | None,
        progress: Progress | None = None,
    ) -> None:
        """queue: the file, None: in memory. keep: see Keeper. progress: see resolve_model.

        Errors beside those of LocalBackend: QueueFileError when the file cannot be used, ResumeRefusedError when it
        has unfinished jobs that were accepted by an engine with other settings.
        """
        self.is_durable = queue is not None
        self._owner = os.getpid()
        with contextlib.ExitStack() as undo:
            store = Store(queue)
            undo.callback(store.close)
            self.fingerprint = _check_about(store, model, config, progress)
            self.local = LocalBackend(model, config, on_event)
            undo.callback(self.local.close, True)
            self.keeper = Keeper(self.local, store, keep)
            undo.pop_all()

    @property
    def num_slots(self) -> int:
        return self.local.num_slots

    @property
    def model_names(self) -> frozenset[str]:
        return self.local.model_names

    @property
    def is_own_thread(self) -> bool:
        return self.local.is_own_thread or self.keeper.is_own_thread

    def new_id(self) -> str:
        return self.local.new_id()

    # ---- jobs ----

    def begin(self, jobs: Sequence[Job]) -> None:
        """Kept jobs are on the disk when this returns."""
        kept = [job for job in jobs if job.kept]
        if kept:
            self.keeper.submit([Order(job.id, job.request, job.options, job) for job in kept]).result()
        others = [job for job in jobs if not job.kept]
        if others:
            self.local.begin(others)

    def watch(self, job: Job) -> None:
        if job.kept:
            self.keeper.watch(job.id, job)
        else:
            self.local.watch(job)

    def cancel(self, job: Job) -> None:
        if job.kept:
            with contextlib.suppress(EngineError):  # closed
                self.keeper.cancel(job.id)
        else:
            self.local.cancel(job)

    # ---- jobs by id ----

    def follow(self, id: str, follower: Callable[[GenerationRequest, JobOptions], Follower]) -> Future[Follower]:
        """See Keeper.follow."""
        return self.keeper.follow(id, lambda row: follower(*rules.asked(row)))

    def acknowledge(self, ids: Sequence[str]) -> Future[None]:
        return self.keeper.acknowledge(ids)

    def claim(self, reader: str, limit: int, timeout: float | None) -> list[Row]:
        asked = self.keeper.claim(reader, limit)
        try:
            return asked.result(timeout)
        except TimeoutError:
            self.keeper.caught_up().result()
            return [] if asked.cancel() else asked.result()
        except KeyboardInterrupt:
            if not asked.cancel():
                self.release(reader)
            raise

    def read(self, claimed: Row) -> tuple[str, GenerationRequest, JobOptions, Completion | Exception]:
        try:
            request, options = rules.asked(claimed)
        except Exception as error:
            raise self.keeper.damaged(claimed, error) from None
        return claimed.id, request, options, self.keeper.outcome(claimed)

    def release(self, reader: str) -> None:
        self.keeper.release(reader)

    def idle(self) -> Future[None]:
        """Done as soon as no job of the queue is unfinished."""
        return self.keeper.idle()

    # ---- the rest ----

    def count_tokens(self, requests: Sequence[TextRequest]) -> Future[list[Any]]:
        return self.local.count_tokens(requests)

    def render(self, requests: Sequence[TextRequest]) -> Future[list[Any]]:
        return self.local.render(requests)

    def stats(self) -> dict[str, Any]:
        found = self.local.stats()
        found["queue"]["kept"] = self.keeper.stats()
        return found

    def set_workers(self, count: int) -> None:
        self.local.set_workers(count)

    def wait_ready(self, timeout: float | None) -> bool:
        return self.local.wait_ready(timeout)

    def close(self, wait: bool) -> None:
        if os.getpid() == self._owner:
            self.keeper.close(wait and not self.is_own_thread)


def _check_about(store: Store, model: str | os.PathLike[str], config: EngineConfig, progress: Progress | None) -> str:
    """Record what the tokens of its jobs depend on; the system fingerprint. ResumeRefusedError when that was something
    else and there are unfinished jobs."""
    from coremill.native.cache import ensure_pack
    from coremill.native.packfile import open_pack

    with open_pack(ensure_pack(model, progress=progress)) as pack:
        fingerprint = system_fingerprint(pack.key, config.kv)
        ctx = config.longest_request(pack.spec.context_length)
    now = {"fingerprint": fingerprint, "seed": str(config.seed), "ctx": str(ctx)}
    with store.transaction():
        before = store.about()
        changed = [name for name in now if before.get(name, now[name]) != now[name]]
        if changed and store.has_unfinished():
            said = "; ".join(f"{_NAMES[name]} was {before[name]} and is {now[name]}" for name in changed)
            raise ResumeRefusedError(
                f"{store.path} has unfinished jobs that were accepted with other settings: {said}. "
                "Use the earlier settings, or another queue"
            )
        store.set_about(now)
    return fingerprint
