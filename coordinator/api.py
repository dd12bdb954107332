"""The coordinator as a job queue inside a Python program.

from coremill.coordinator import Coordinator

with Coordinator("model.gguf") as c:
    jobs = [c.submit(messages=[{"role": "user", "content": text}], max_tokens=64) for text in texts]
    for job in jobs:
        print(job.result().text)
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coremill.config.engine import DEFAULT_CTX, EngineConfig
from coremill.config.errors import ConfigError, EngineClosedError, EngineError, RequestError
from coremill.config.request import CHAT_URL, COMPLETIONS_URL, GenerationRequest, SequenceResult, parse_body
from coremill.config.request_fields import check_custom_id, check_int, check_token_ids, invalid
from coremill.coordinator.admission import sequence_request
from coremill.coordinator.callbacks import call_back
from coremill.coordinator.limits import MAX_PRIORITY
from coremill.coordinator.text.requests import TextRequest
from coremill.coordinator.text.service import TextService

if TYPE_CHECKING:
    from coremill.coordinator.engine import Engine


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

    queued_s: float
    prefill_s: float
    decode_s: float
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


class Job(Future):
    """A submitted request: `result(timeout=None)` waits for its Completion.

    It raises RequestError when the request failed, EngineClosedError when the coordinator was closed before it was
    done, EngineError when the engine could not go on, CancelledError after cancel().
    """

    def __init__(self, coordinator: Coordinator, request: GenerationRequest, priority: int) -> None:
        super().__init__()
        self.custom_id = request.custom_id
        self.request = request
        self.priority = priority
        self._coordinator = coordinator
        self._ticket: int | None = None
        self._told = threading.Lock()  # whoever gets it tells those who wait for several jobs

    def cancel(self) -> bool:
        """Stop it, within one step if it is running. False when it is done already."""
        self._coordinator._check_owner()
        if not super().cancel():
            return False
        if self._told.acquire(blocking=False):
            self.set_running_or_notify_cancel()
        self._coordinator._cancel(self)
        return True

    def result(self, timeout: float | None = None) -> Completion:
        """The Completion; TimeoutError when it takes longer than `timeout` seconds."""
        self._coordinator._check_owner()  # in a forked child nobody would ever answer
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` would raise, None when it is a Completion. Waits and times out as that does."""
        self._coordinator._check_owner()
        return super().exception(timeout)

    def _finish(self, outcome: Completion | Exception) -> None:
        """On a thread of ours, as are the callbacks that its owner has given it."""
        if not self._told.acquire(blocking=False) or not self.set_running_or_notify_cancel():
            return
        # Future itself catches what a callback raises, but not SystemExit and the like.
        finish = self.set_exception if isinstance(outcome, Exception) else self.set_result
        call_back("a job's callback", finish, outcome)


class Coordinator:
    """Workers on every core, and a queue of requests for them.

    Args:
        model: a GGUF file, a pack, or a short name ("smollm2").
        on_event: told what happens to workers (see Engine); called on another thread.
        options: fields of EngineConfig (workers, cores_per_worker, max_active, ctx, arena, seed, ...).

    Usable from any number of threads. Workers start at once and load while you go on. After close(), or at the end
    of the `with` block, unfinished jobs raise EngineClosedError. One that nobody refers to any more, neither directly
    nor by a job, closes when it is collected.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        **options: Any,
    ) -> None:
        from coremill.native.cache import ensure_pack

        self._owner = os.getpid()
        self._numbers = itertools.count(1)
        if not isinstance(model, (str, os.PathLike)) or not isinstance(os.fspath(model), str):
            raise ConfigError(f"model is {model!r}: it must be the path of a file or a short name")
        if on_event is not None and not callable(on_event):
            raise ConfigError(f"on_event is {on_event!r}: it must be a function")
        self.config = EngineConfig.from_keywords(**options)
        pack_path = ensure_pack(model)
        with contextlib.ExitStack() as undo:  # also on Ctrl-C
            # The text helper takes longest to load, so it comes first, and our own imports behind it.
            self._text = TextService(pack_path, max_tokens=self.config.ctx or DEFAULT_CTX)
            undo.callback(self._text.close)
            self._engine = _new_engine(pack_path, self.config, on_event)
            undo.callback(self._engine.close)
            self._engine.start()
            undo.pop_all()
        _coordinators.add(self)
        weakref.finalize(self, _let_go, self._owner, self._text, self._engine)

    # ---- jobs ----

    def submit(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        prompt_ids: Sequence[int] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: str | Iterable[str] | None = None,
        custom_id: str | None = None,
        allow_special: bool = False,
        priority: int = 0,
    ) -> Job:
        """Queue one request; exactly one of prompt, messages and prompt_ids.

        Args:
            prompt: text to continue. messages: a chat, for the model's template. prompt_ids: token ids as they are.
            max_tokens: default 16 for prompts, the room left in ctx for chats.
            temperature: default 1; 0 always takes the most likely token. top_p, top_k, min_p: fewer to choose from.
            seed: default drawn from the run's seed and custom_id.
            stop: strings that end the text, which does not contain them.
            allow_special: the request's own texts may spell the model's control tokens.
            custom_id: up to 1024 characters; default "job-N". priority: an integer; higher runs first.

        Raises:
            RequestError: a field is wrong. What is found out later (template, length) is raised by Job.result().
            EngineClosedError: after close().
        """
        self._check_owner()
        given = {"prompt": prompt, "messages": messages, "prompt_ids": prompt_ids}
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        sampling |= {"min_p": min_p, "seed": seed, "stop": _stops(stop), "allow_special": allow_special}
        custom_id = f"job-{next(self._numbers)}" if custom_id is None else check_custom_id(custom_id)
        priority = check_int(priority, "priority", -MAX_PRIORITY, MAX_PRIORITY)
        request = _checked(given, sampling, custom_id)
        job = Job(self, request, priority)
        if prompt_ids is not None:
            self._hand_over(job, request.prompt)
        else:
            text = TextRequest(messages=request.messages, prompt=request.prompt, allow_special=request.allow_special)
            self._text.submit([text]).add_done_callback(lambda prepared: self._tokenised(job, prepared))
        return job

    def _tokenised(self, job: Job, prepared: Future) -> None:
        """On the text service's thread."""
        try:
            (outcome,) = prepared.result()
            if isinstance(outcome, RequestError):
                raise outcome
            self._hand_over(job, tuple(outcome))
        except Exception as error:  # whatever it is, the job's owner waits for it
            job._finish(error)

    def _hand_over(self, job: Job, prompt_ids: tuple[int, ...]) -> None:
        if job.cancelled():
            return
        request = sequence_request(job.request, prompt_ids, self._engine.max_length, self.config.seed)
        request.priority = job.priority
        job._ticket = self._engine.submit(request, lambda result: job._finish(_outcome(result, len(prompt_ids))))
        if job.cancelled():  # meanwhile
            self._cancel(job)

    def _cancel(self, job: Job) -> None:
        if job._ticket is not None:
            self._engine.cancel(job._ticket)

    # ---- the whole ----

    def stats(self) -> dict[str, Any]:
        """The queue, the KV arena, and `workers`: for each pid, cores, state, prefill_tokens, decode_tokens,
        busy_seconds, mean_batch, rss_bytes, pss_bytes and how that splits into weights, arena and private memory."""
        return self._engine.stats()

    def workers(self, count: int) -> None:
        """Change the number of workers, 1 to the number it began with. What they run goes on; nothing is lost."""
        self._engine.set_workers(count)

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Block until every worker has loaded the model; False on timeout."""
        return self._engine.wait_ready(timeout)

    def close(self) -> None:
        """End workers and helper and wait for them. Unfinished jobs raise EngineClosedError. May be repeated.

        In a callback, which runs on one of our threads, it only begins to.
        """
        if os.getpid() != self._owner:
            return  # a forked child has nothing to close
        wait = not (self._text.is_own_thread or self._engine.is_own_thread)
        self._text.close(wait)
        self._engine.close(wait)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise EngineError(
                f"this coordinator belongs to process {self._owner}; process {os.getpid()} was forked from it and "
                "cannot use it: create one after the fork, or start processes with 'spawn'"
            )


def _new_engine(pack_path: Path, config: EngineConfig, on_event: Callable[[dict[str, Any]], None] | None) -> Engine:
    from coremill.config.topology import discover
    from coremill.coordinator.engine import Engine

    groups = discover(workers=config.workers, cores_per_worker=config.cores_per_worker)
    return Engine(pack_path, config, groups, on_event=on_event)


def _let_go(owner: int, text: TextService, engine: Engine) -> None:
    """Nobody has the coordinator any more. On whatever thread found that out, so nothing is waited for."""
    if os.getpid() == owner:
        text.close(wait=False)
        engine.close(wait=False)


def _listed(value: Any, param: str, limit: str) -> list[Any]:
    """Anything that can be gone through once: a tuple, a generator, an array."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise invalid(param, value, limit)
    return list(value)


def _stops(stop: Any) -> Any:
    return stop if stop is None or isinstance(stop, str) else _listed(stop, "stop", "a string or a list of strings")


def _checked(given: dict[str, Any], sampling: dict[str, Any], custom_id: str) -> GenerationRequest:
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        said = " and ".join(named) if named else "none of them"
        raise RequestError("invalid_value", f"give exactly one of prompt, messages and prompt_ids, not {said}")
    (name,) = named
    value = given[name]
    if name == "prompt":
        if not isinstance(value, str):
            raise RequestError("invalid_value", f"prompt is {type(value).__name__}: it must be a string", "prompt")
        return parse_body(COMPLETIONS_URL, {"prompt": value, **sampling}, custom_id=custom_id)
    if name == "prompt_ids":
        ids = check_token_ids(_listed(value, name, "a list of token ids"), name)
        return parse_body(COMPLETIONS_URL, {"prompt": ids, **sampling}, custom_id=custom_id)
    messages = _listed(value, name, "a list of messages")
    messages = [dict(message) if isinstance(message, Mapping) else message for message in messages]
    return parse_body(CHAT_URL, {"messages": messages, **sampling}, custom_id=custom_id)


def _outcome(result: SequenceResult, num_prompt: int) -> Completion | Exception:
    if result.error is not None:
        kinds = {"engine_closed": EngineClosedError, "engine_failed": EngineError}
        kind = kinds.get(result.error.code)
        return kind(result.error.message) if kind else result.error
    return Completion(
        custom_id=result.key,
        text=result.text,
        token_ids=tuple(result.token_ids),
        finish_reason=result.finish_reason,
        usage=Usage(num_prompt, len(result.token_ids), result.cached_tokens),
        timing=Timing(result.queued_s, result.prefill_s, result.decode_s, result.worker),
    )


_coordinators: weakref.WeakSet[Coordinator] = weakref.WeakSet()


def _close_all() -> None:
    for coordinator in list(_coordinators):
        coordinator.close()


# The threads are daemons, which the end of the interpreter would cut off in the middle of a call.
atexit.register(_close_all)
