"""Jobs on an engine of this process."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coremill.config.engine import DEFAULT_CTX, EngineConfig
from coremill.config.errors import EngineClosedError, EngineError, RequestError
from coremill.config.joboptions import too_late
from coremill.config.request import SequenceRequest, SequenceResult
from coremill.coordinator.admission import sequence_request
from coremill.coordinator.python.job import Completion, Job, Timing, Usage
from coremill.coordinator.text.requests import TextRequest
from coremill.coordinator.text.service import TextService

if TYPE_CHECKING:
    from coremill.coordinator.engine import Engine
    from coremill.coordinator.timers import Timer

# Failures that need not recur when the request is run again.
MAY_PASS = frozenset({"worker_crashed", "nonfinite_logits", "text_helper_died", "text_time_limit", "text_memory_limit"})


@dataclass(slots=True)
class _Run:
    """What we remember of a job. ticket: of its present sequence in the engine."""

    retries_left: int
    begun: float
    ticket: int | None = None
    timer: Timer | None = None


class LocalBackend:
    """A text helper and an engine with its workers, started at once. See Backend.

    Errors of the constructor: ConfigError, ModelError, UnsupportedHostError, WorkerStartError.
    """

    def __init__(
        self, model: str | os.PathLike[str], config: EngineConfig, on_event: Callable[[dict[str, Any]], None] | None
    ) -> None:
        from coremill.native.cache import ensure_pack

        self._model, self._config = os.fspath(model), config
        self._owner = os.getpid()
        self._ids, self._mark = itertools.count(1), secrets.token_hex(6)
        self._pack_path = ensure_pack(model)
        with ExitStack() as undo:  # also on Ctrl-C
            # The text helper takes longest to load, so it comes first, and our own imports behind it.
            self.text = TextService(self._pack_path, max_tokens=config.ctx or DEFAULT_CTX)
            undo.callback(self.text.close)
            self.engine = _new_engine(self._pack_path, config, on_event)
            undo.callback(self.engine.close)
            self.engine.start()
            undo.pop_all()

    keeps_jobs = is_durable = begin_waits = False

    @property
    def num_slots(self) -> int:
        return len(self.engine.groups) * self._config.max_active

    @cached_property
    def model_names(self) -> frozenset[str]:
        from coremill.coordinator.batch.job import model_names
        from coremill.native.packfile import open_pack

        with open_pack(self._pack_path) as pack:
            return frozenset(model_names(pack, self._model))

    @property
    def is_own_thread(self) -> bool:
        return self.text.is_own_thread or self.engine.is_own_thread

    def new_id(self) -> str:
        return f"{self._mark}-{next(self._ids)}"

    # ---- jobs ----

    def begin(self, jobs: Sequence[Job]) -> None:
        texts = []
        for job in jobs:
            left = job.options.seconds_left()
            job.handle = _Run(job.options.retries, time.time())
            if left is not None:
                job.handle.timer = self.engine.call_at(time.monotonic() + left, partial(self._expire, job))
                job.add_done_callback(_stop_timer)
            if isinstance(job.request.prompt, tuple):
                try:
                    self._hand_over(job, job.request.prompt)
                except RequestError as error:
                    job.finish(error)
            else:
                texts.append(job)
        if texts:
            asked = self.text.submit([text_request(job) for job in texts])
            asked.add_done_callback(lambda prepared: self._prepared(texts, prepared))

    def _prepared(self, jobs: Sequence[Job], prepared: Future[list[Any]]) -> None:
        """On the text service's thread."""
        error = prepared.exception()
        for job, outcome in zip(jobs, [error] * len(jobs) if error else prepared.result(), strict=True):
            try:
                if isinstance(outcome, Exception):
                    self._failed(job, outcome, partial(self._prepare_again, job))
                else:
                    self._hand_over(job, outcome)
            except Exception as error:  # whatever it is, the job's owner waits for it
                job.finish(error)

    def _prepare_again(self, job: Job) -> None:
        asked = self.text.submit([text_request(job)])
        asked.add_done_callback(lambda prepared: self._prepared([job], prepared))

    def _hand_over(self, job: Job, prompt_ids: tuple[int, ...]) -> None:
        if job.done():
            return
        request = sequence_request(job.request, prompt_ids, self.engine.max_length, self._config.seed, job.options)

        def done(result: SequenceResult) -> None:
            outcome = completion_of(job, result, len(prompt_ids))
            if isinstance(outcome, Exception):
                if isinstance(outcome, RequestError) and outcome.code == "worker_crashed":
                    outcome = self._reproducible(outcome, job, request)
                self._failed(job, outcome, lambda: self._hand_over(job, prompt_ids))
            else:
                job.finish(outcome)

        run = job.handle
        run.ticket = None
        job.restart_text()
        run.ticket = self.engine.submit(request, done)
        if job.watched:
            self.engine.watch(run.ticket, job.feed_text)
        if job.done():  # meanwhile
            self.engine.cancel(run.ticket)

    def _reproducible(self, error: RequestError, job: Job, request: SequenceRequest) -> RequestError:
        """The error, with a call that runs the job alone."""
        from coremill.coordinator.batch.reproduce import reproducing_call

        call = reproducing_call(self._model, self._config, job.request, request)
        said = f"{error.message}; this runs it alone, with its {len(request.prompt_ids)} prompt tokens: {call}"
        return RequestError(error.code, said, error.param)

    def _failed(self, job: Job, error: Exception, again: Callable[[], None]) -> None:
        run = job.handle
        if isinstance(error, RequestError) and error.code in MAY_PASS and run.retries_left > 0:
            run.retries_left -= 1
            try:
                again()
                return
            except Exception as other:
                error = other
        job.finish(error)

    def _expire(self, job: Job) -> None:
        """On the engine's thread."""
        job.finish(too_late(job.options, job.handle.begun))
        self.cancel(job)

    def watch(self, job: Job) -> None:
        run = job.handle
        if run is not None and run.ticket is not None:
            self.engine.watch(run.ticket, job.feed_text)

    def cancel(self, job: Job) -> None:
        run = job.handle
        if run is not None and run.ticket is not None:
            self.engine.cancel(run.ticket)

    # ---- the rest ----

    def count_tokens(self, requests: Sequence[TextRequest]) -> Future[list[Any]]:
        return self.text.submit(requests, "count")

    def render(self, requests: Sequence[TextRequest]) -> Future[list[Any]]:
        return self.text.submit(requests, "render")

    def idle(self) -> Future[None]:
        nothing_kept: Future[None] = Future()
        nothing_kept.set_result(None)
        return nothing_kept

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def set_workers(self, count: int) -> None:
        self.engine.set_workers(count)

    def wait_ready(self, timeout: float | None) -> bool:
        return self.engine.wait_ready(timeout)

    def close(self, wait: bool) -> None:
        if os.getpid() != self._owner:
            return  # a forked child has nothing to close
        wait = wait and not self.is_own_thread
        self.text.close(wait)
        self.engine.close(wait)


def _new_engine(pack_path: Path, config: EngineConfig, on_event: Callable[[dict[str, Any]], None] | None) -> Engine:
    from coremill.config.topology import discover
    from coremill.coordinator.engine import Engine

    groups = discover(workers=config.workers, cores_per_worker=config.cores_per_worker)
    return Engine(pack_path, config, groups, on_event=on_event)


def text_request(job: Job) -> TextRequest:
    request = job.request
    return TextRequest(messages=request.messages, prompt=request.prompt, allow_special=request.allow_special)


def completion_of(job: Job, result: SequenceResult, num_prompt: int) -> Completion | Exception:
    """What a sequence of the engine means for its job."""
    if result.error is not None:
        kinds = {"engine_closed": EngineClosedError, "engine_failed": EngineError}
        kind = kinds.get(result.error.code)
        return kind(result.error.message) if kind else result.error
    return Completion(
        custom_id=result.key,
        text=result.text,
        token_ids=tuple(result.token_ids),
        finish_reason=result.finish_reason or "stop",
        usage=Usage(num_prompt, len(result.token_ids), result.cached_tokens),
        timing=Timing(result.queued_s, result.prefill_s, result.decode_s, result.worker),
        metadata=job.metadata,
    )


def _stop_timer(job: Any) -> None:
    """A Job, or what else stands for one (queue/errand.py)."""
    if job.handle.timer is not None:
        job.handle.timer.cancel()
