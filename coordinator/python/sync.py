"""The coordinator for programs with threads."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from coremill.config.engine import EngineConfig
from coremill.config.errors import ConfigError, EngineClosedError, EngineError, RequestError
from coremill.config.joboptions import JobOptions, check_job_options, check_wait
from coremill.config.options import BY_NAME
from coremill.config.request import GenerationRequest
from coremill.config.request_fields import check_custom_id
from coremill.coordinator.python.asking import request_of_fields
from coremill.coordinator.python.job import Job
from coremill.coordinator.python.kept import KeptJobs
from coremill.coordinator.python.lifecycle import belongs_elsewhere, watch_over
from coremill.coordinator.python.maps import Maps
from coremill.coordinator.python.roster import Roster
from coremill.coordinator.text.requests import TextRequest

if TYPE_CHECKING:
    import datetime

    from coremill.coordinator.python.backend import Backend


class Coordinator(KeptJobs, Maps):
    """Workers on every core, and a queue of requests for them.

        with Coordinator("smollm2") as c:
            job = c.submit("The capital of France is", max_tokens=8, temperature=0)
            print(job.result().text)

    Args:
        model: a GGUF file, a pack, or a short name ("smollm2").
        max_queue: most unfinished jobs at a time; submit() waits, or raises, beyond. None: any number.
        queue: a file that keeps jobs and outcomes (docs/queue.md): they outlive crashes of everything. keep: seconds
            after which outcomes that nobody acknowledges are forgotten; None: never.
        on_event: told what happens to workers (see Engine); called on another thread.
        options: fields of EngineConfig (workers, cores_per_worker, max_active, ctx, arena, seed, ...).

    Usable from any number of threads. Workers start at once and load while you go on. After close(), or at the end
    of the `with` block, unfinished jobs raise EngineClosedError. One that nobody refers to any more, neither directly
    nor by a job, closes when it is collected. It belongs to the process that made it: after a fork, everything in the
    child raises EngineError, also the jobs that were unfinished.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        max_queue: int | None = None,
        queue: str | os.PathLike[str] | None = None,
        keep: float | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        **options: Any,
    ) -> None:
        from coremill.coordinator.queue.opening import new_backend

        if not isinstance(model, (str, os.PathLike)) or not isinstance(os.fspath(model), str):
            raise ConfigError(f"model is {model!r}: it must be the path of a file or a short name")
        if on_event is not None and not callable(on_event):
            raise ConfigError(f"on_event is {on_event!r}: it must be a function")
        if max_queue is not None and (isinstance(max_queue, bool) or not isinstance(max_queue, int) or max_queue < 1):
            raise ConfigError(f"max_queue is {max_queue!r}: it must be an integer of at least 1, or None")
        config = EngineConfig.from_keywords(**options)
        self._set_up(new_backend(model, config, on_event, queue, keep), max_queue)

    @classmethod
    def attach(
        cls,
        address: str | None = None,
        *,
        keys: str | os.PathLike[str] | None = None,
        max_queue: int | None = None,
    ) -> Coordinator:
        """Submit to the resident coordinator of another process (`coremill up`), like any other coordinator. Any number
        of processes may be attached to one; they may end, and come back to kept jobs by their ids.

        Args:
            address: as `coremill up` says it; None: the one that runs for this user. keys: for tcp:// addresses, the
                folder with client.secret and server.public.
            max_queue: as above, for the jobs of this client.

        close() detaches: kept jobs go on, the others are cancelled. Errors: ConfigError, EngineClosedError.
        """
        from coremill.coordinator.attach.remote import RemoteBackend

        return cls.over(RemoteBackend(address, keys), max_queue)

    @classmethod
    def over(cls, backend: Backend, max_queue: int | None = None) -> Coordinator:
        """One whose jobs run elsewhere."""
        coordinator = cls.__new__(cls)
        coordinator._set_up(backend, max_queue)
        return coordinator

    def _set_up(self, backend: Backend, max_queue: int | None) -> None:
        self._owner = os.getpid()
        self._backend = backend
        self._roster = Roster(max_queue)
        self._numbers = itertools.count(1)
        watch_over(self, backend)

    # ---- jobs ----

    def submit(
        self,
        prompt: str | None = None,
        *,
        messages: Iterable[Mapping[str, Any]] | None = None,
        prompt_ids: Iterable[int] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: str | Iterable[str] | None = None,
        allow_special: bool = False,
        id: str | None = None,
        custom_id: str | None = None,
        metadata: Mapping[str, str] | None = None,
        priority: int = 0,
        timeout: float | None = None,
        deadline: float | datetime.datetime | None = None,
        retries: int = 0,
        wait: bool | float = True,
    ) -> Job:
        """Queue one request; exactly one of prompt, messages and prompt_ids.

            job = c.submit(messages=[{"role": "user", "content": "Hello"}], max_tokens=40, priority=1, timeout=30)

        Args:
            prompt: text to continue. messages: a chat, for the model's template. prompt_ids: token ids as they are.
            max_tokens: default 16 for prompts, the room left in ctx for chats.
            temperature: default 1; 0 always takes the most likely token. top_p, top_k, min_p: fewer to choose from.
            seed: default drawn from the run's seed and custom_id.
            stop: strings that end the text, which does not contain them.
            allow_special: the request's own texts may spell the model's control tokens.
            id: where jobs are kept (queue=..., attach), the job's name from now on: submitting the same request again
                gives the same job, another request is refused. Default: a new one.
            custom_id: up to 1024 characters; default the id, or "job-N". metadata: up to 16 pairs of strings; both
                come back.
            priority: an integer; higher runs first, and what is lower pauses meanwhile where it stands.
            timeout, deadline: seconds from now, or a Unix time or datetime, after which it ends with an error.
            retries: how often it is begun again after a failure that need not recur (a crash).
            wait: what to do while max_queue jobs are unfinished: True waits, False raises QueueFullError, a number
                waits at most so many seconds.

        Raises:
            RequestError: a field is wrong. What is found out later (template, length) is raised by Job.result().
            QueueFullError: see wait. EngineClosedError: after close().
        """
        self._check_owner()
        given = {
            "prompt": prompt, "messages": messages, "prompt_ids": prompt_ids, "max_tokens": max_tokens,
            "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed, "stop": stop,
            "allow_special": allow_special, "metadata": metadata,
        }  # fmt: skip
        options = {"priority": priority, "timeout": timeout, "deadline": deadline, "retries": retries}
        kept = self._is_kept(id)
        request, checked = self._checked(given, options, id if custom_id is None else custom_id)
        self._roster.enter(False if self._backend.is_own_thread else wait)
        return self._begin(request, checked, id, kept)

    def _checked(
        self, given: dict[str, Any], options: dict[str, Any], custom_id: str | None
    ) -> tuple[GenerationRequest, JobOptions]:
        custom_id = f"job-{next(self._numbers)}" if custom_id is None else check_custom_id(custom_id)
        return request_of_fields(given, custom_id), check_job_options(options)

    def _begin(self, request: GenerationRequest, options: JobOptions, id: str | None = None, kept: bool = False) -> Job:
        """In a place of the roster that has been taken for it."""
        job = Job(self, self._backend.new_id() if id is None else id, request, options, kept)
        self._roster.sign(job)
        try:
            self._backend.begin([job])
        except BaseException:
            job._abandon()
            raise
        return job

    def cancel_all(self) -> None:
        """Cancel every unfinished job."""
        self._check_owner()
        for job in self._roster.jobs():
            job.cancel()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until no job is unfinished, also none of the queue; False when that takes longer than `timeout` seconds.
        Ctrl-C meanwhile cancels all that are not kept. From a job's callback it would wait for itself: EngineError."""
        self._check_owner()
        if self._backend.is_own_thread:
            raise EngineError("drain() in a callback would wait for the thread it runs on: call it on your own thread")
        timeout = check_wait(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        for idle in (self._roster.idle(), self._backend.idle()):
            try:
                idle.result(None if end is None else max(0.0, end - time.monotonic()))
            except TimeoutError:
                if idle.cancel():
                    return False
            except KeyboardInterrupt:
                for job in self._roster.jobs():
                    job._interrupt()
                raise
        return True

    # ---- text ----

    def count_tokens(self, prompt: str | None = None, *, messages: Iterable[Mapping[str, Any]] | None = None) -> int:
        """Tokens of a text or of a chat in its template, as submit() would count them. RequestError as there."""
        self._check_owner()
        request = request_of_fields({"prompt": prompt, "messages": messages}, "count")
        return _only(self._backend.count_tokens([TextRequest(messages=request.messages, prompt=request.prompt)]))

    def apply_template(self, messages: Iterable[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The text that the model's template makes of a chat. RequestError when it refuses."""
        self._check_owner()
        request = request_of_fields({"messages": messages}, "template")
        asked = TextRequest(messages=request.messages, add_generation_prompt=add_generation_prompt)
        return _only(self._backend.render([asked]))

    # ---- the whole ----

    def stats(self) -> dict[str, Any]:
        """The queue, the KV arena, and `workers`: for each pid, cores, state, prefill_tokens, decode_tokens,
        busy_seconds, borrowed_steps, mean_batch, rss_bytes, pss_bytes and how that splits into weights, arena and
        private memory.
        `queue` also has `unfinished` (jobs of this coordinator) and `max_queue`."""
        self._check_owner()
        found = self._backend.stats()
        found["queue"] |= {"unfinished": self._roster.num_unfinished, "max_queue": self._roster.limit}
        return found

    def workers(self, count: int) -> None:
        """Change the number of workers, 1 to the number it began with. What they run goes on; nothing is lost."""
        self._check_owner()
        self._backend.set_workers(BY_NAME["workers"].check(count, "workers"))

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Block until every worker has loaded the model; False on timeout."""
        self._check_owner()
        return self._backend.wait_ready(check_wait(timeout))

    def close(self) -> None:
        """End workers and helper and wait for them. Unfinished jobs raise EngineClosedError. May be repeated.

        In a callback, which runs on one of our threads, it only begins to.
        """
        if os.getpid() != self._owner:
            return  # a forked child has nothing to close
        self._roster.close(EngineClosedError("the coordinator was closed"))
        self._backend.close(True)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a Coordinator belongs to the process that made it: make one in each process, or attach to one")

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise belongs_elsewhere(self._owner)


def _only(asked: Future[list[Any]]) -> Any:
    (answer,) = asked.result()
    if isinstance(answer, RequestError):
        raise answer
    return answer
