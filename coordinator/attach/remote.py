"""Jobs on the resident coordinator of another process (`coremill up`)."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from coremill.config.errors import ConfigError, EngineError, RequestError
from coremill.config.joboptions import JobOptions
from coremill.config.request import CHAT_URL, COMPLETIONS_URL, GenerationRequest
from coremill.coordinator.attach import VERSION
from coremill.coordinator.local_socket import LocalClient, running
from coremill.coordinator.local_socket.wire import error_of
from coremill.coordinator.queue.forms import form_of, options_form, options_of, outcome_of, request_of

if TYPE_CHECKING:
    from coremill.coordinator.python.job import Completion, Job
    from coremill.coordinator.text.requests import TextRequest

_HELLO_S, _CALL_S = 30.0, 60.0
_READY_PAUSE_S = 0.05


def find_address() -> str:
    """Of the one resident coordinator of this user. ConfigError when there is none, or more than one."""
    found = [record for record in running() if record.kind == "up"]
    if len(found) == 1:
        return found[0].address
    if not found:
        raise ConfigError("no coordinator to attach to: start one with `coremill up -m MODEL`, or give its address")
    there = ", ".join(f"{record.address} ({record.model}, process {record.pid})" for record in found)
    raise ConfigError(f"there are {len(found)} coordinators to attach to, give the address of one: {there}")


class RemoteBackend:
    """See Backend and Keeping. When the coordinator ends or the connection is lost, unfinished jobs end with
    EngineClosedError; those that are kept are found again, by their ids, through a new one.

    Errors of the constructor: ConfigError for an address that cannot be, EngineClosedError when nobody is there.
    """

    keeps_jobs = begin_waits = True

    def __init__(self, address: str | None = None, keys: str | os.PathLike[str] | None = None) -> None:
        self._owner = os.getpid()
        self._ids, self._mark = itertools.count(1), secrets.token_hex(6)
        self._lock = threading.Lock()
        self._jobs: dict[str, list[Job]] = {}  # unfinished ones, by id
        self._client = LocalClient(find_address() if address is None else address, keys)
        with contextlib.ExitStack() as undo:
            undo.callback(self._client.close)
            said = self._client.call("hello", {"version": VERSION}, _HELLO_S)
            undo.pop_all()
        self.about: dict[str, Any] = said
        self.is_durable: bool = said["durable"]
        self.num_slots: int = said["num_slots"]
        self.model_names = frozenset(said["model_names"])
        self._thread = threading.Thread(target=self._hear, name="coremill-attach", daemon=True)
        self._thread.start()

    @property
    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def new_id(self) -> str:
        return f"{self._mark}-{next(self._ids)}"

    # ---- jobs ----

    def begin(self, jobs: Sequence[Job]) -> None:
        """Kept jobs are accepted when this returns: with a durable queue, on the disk."""
        for job in jobs:
            self._enter(job)
        try:
            self._submit(jobs)
        except BaseException:
            for job in jobs:
                self._leave(job)
            raise

    def _submit(self, jobs: Sequence[Job]) -> None:
        forms = [
            {
                "id": job.id,
                "kept": job.kept,
                "watched": job.watched,
                "request": form_of(job.request),
                "options": options_form(job.options),
            }
            for job in jobs
        ]
        try:
            self._client.call("submit", {"jobs": forms}, None)
        except RequestError as error:
            if error.code != "too_large" or len(jobs) == 1:
                raise
            for part in (jobs[: len(jobs) // 2], jobs[len(jobs) // 2 :]):
                self._submit(part)

    def _enter(self, job: Job) -> None:
        with self._lock:
            self._jobs.setdefault(job.id, []).append(job)

    def _leave(self, job: Job) -> None:
        with self._lock:
            jobs = self._jobs.get(job.id, [])
            if job in jobs:
                jobs.remove(job)
            if not jobs:
                self._jobs.pop(job.id, None)

    def watch(self, job: Job) -> None:
        with contextlib.suppress(EngineError):  # its end says so
            self._client.start("watch", {"id": job.id})

    def cancel(self, job: Job) -> None:
        self._leave(job)
        with contextlib.suppress(EngineError):
            self._client.start("cancel_job", {"id": job.id})

    # ---- jobs by id ----

    def follow(self, id: str, make: Callable[[GenerationRequest, JobOptions], Job]) -> Future[Job]:
        answer: Future[Job] = Future()

        def said(asked: Future[dict[str, Any]]) -> None:
            """On the client's thread, before it hears any news of the job."""
            try:
                form = asked.result()
                job = make(request_of(form["request"]), options_of(form["options"]))
                self._enter(job)
            except BaseException as error:
                answer.set_exception(error)
            else:
                answer.set_result(job)

        self._client.start("job", {"id": id}).add_done_callback(said)
        return answer

    def acknowledge(self, ids: Sequence[str]) -> Future[None]:
        return self._client.start("acknowledge", {"ids": list(ids)})

    def claim(self, reader: str, limit: int, timeout: float | None) -> list[dict[str, Any]]:
        asked = self._client.start("claim", {"reader": reader, "limit": limit})
        try:
            return asked.result(timeout)
        except TimeoutError:
            self._client.start("unclaim", {"reader": reader})
            return asked.result(_CALL_S)
        except KeyboardInterrupt:
            self.release(reader)
            raise

    def read(self, claimed: dict[str, Any]) -> tuple[str, GenerationRequest, JobOptions, Completion | Exception]:
        if "failure" in claimed:
            raise error_of(claimed["failure"])
        try:
            request = request_of(claimed["request"])
            return claimed["id"], request, options_of(claimed["options"]), outcome_of(claimed["outcome"], request)
        except Exception as error:
            text = f"job {claimed.get('id')!r} cannot be read ({type(error).__name__}: {error}); cancel() forgets it"
            raise RequestError("damaged", text, "id") from None

    def release(self, reader: str) -> None:
        with contextlib.suppress(EngineError):
            self._client.start("release", {"reader": reader})

    def idle(self) -> Future[None]:
        """What others have submitted is no affair of this client."""
        nothing_more: Future[None] = Future()
        nothing_more.set_result(None)
        return nothing_more

    # ---- the rest ----

    def count_tokens(self, requests: Sequence[TextRequest]) -> Future[list[Any]]:
        return self._ask_texts("count", requests)

    def render(self, requests: Sequence[TextRequest]) -> Future[list[Any]]:
        return self._ask_texts("render", requests)

    def _ask_texts(self, kind: str, requests: Sequence[TextRequest]) -> Future[list[Any]]:
        ask = all(request.add_generation_prompt for request in requests)
        answer: Future[list[Any]] = Future()

        def said(asked: Future[list[Any]]) -> None:
            error = asked.exception()
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result([error_of(one) if isinstance(one, dict) else one for one in asked.result()])

        fields = {"requests": [_text_form(request) for request in requests], "add_generation_prompt": ask}
        self._client.start(kind, fields).add_done_callback(said)
        return answer

    def stats(self) -> dict[str, Any]:
        return self._client.call("stats", {}, _CALL_S)

    def set_workers(self, count: int) -> None:
        self._client.call("workers", {"count": count}, _CALL_S)

    def wait_ready(self, timeout: float | None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        while not self._client.call("ready", {}, _CALL_S):
            if end is not None and time.monotonic() >= end:
                return False
            time.sleep(_READY_PAUSE_S)
        return True

    def close(self, wait: bool) -> None:
        """Leave. The coordinator goes on, and so do kept jobs; the others are cancelled."""
        if os.getpid() == self._owner:
            self._client.close()
            if wait and not self.is_own_thread:
                self._thread.join()

    # ---- the thread ----

    def _hear(self) -> None:
        failure: Exception
        try:
            while True:
                for news in self._client.call("news", {}, None):
                    self._tell(*news)
                del news  # keeps nothing alive while nothing happens
        except EngineError as error:
            failure = error
        except Exception as error:
            failure = EngineError(f"the coordinator said what cannot be read: {type(error).__name__}: {error}")
        with self._lock:
            jobs = [job for those in self._jobs.values() for job in those]
            self._jobs.clear()
        for job in jobs:
            job.finish(type(failure)(str(failure)))

    def _tell(self, id: str, restarted: bool, text: bytes, end: dict[str, Any] | None) -> None:
        with self._lock:
            jobs = list(self._jobs.get(id, ())) if end is None else self._jobs.pop(id, [])
        for job in jobs:
            if restarted:
                job.restart_text()
            if text:
                job.feed_text(text)
            if end is None:
                continue
            job.finish(error_of(end["failure"]) if "failure" in end else outcome_of(end["outcome"], job.request))


def _text_form(request: TextRequest) -> dict[str, Any]:
    body: dict[str, Any] = {"allow_special": request.allow_special}
    if request.messages is not None:
        body["messages"] = [dict(message) for message in request.messages]
    else:
        prompt = request.prompt
        body["prompt"] = prompt if isinstance(prompt, str) or prompt is None else list(prompt)
    return {"custom_id": "text", "url": CHAT_URL if "messages" in body else COMPLETIONS_URL, "body": body}
