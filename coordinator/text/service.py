"""Tokenisation and chat templates for the coordinator: a front for the helper process.

    any thread:   prepare, count, submit --> chunks of rows --+      +--> results in the callers' futures
    one thread:   [waiting chunks] --> pipe --> helper --> pipe --> [answers]

Rows travel in chunks, several of them on their way at once, so that the helper never waits. When it dies, the
oldest unanswered chunk is what it died of. Its rows are then sent one by one; the row that kills the helper all
alone gets the error, everything else goes on. The helper starts in the background and again when it is needed.
"""

from __future__ import annotations

import datetime
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from coremill.config.errors import (
    CoremillError,
    EngineClosedError,
    EngineError,
    ModelError,
    PackError,
    RequestError,
    UnsupportedModelError,
)
from coremill.coordinator.callbacks import call_back
from coremill.coordinator.text import wire
from coremill.coordinator.text.chunks import Chunk, make_chunks
from coremill.coordinator.text.process import Death, HelperProcess
from coremill.coordinator.text.requests import Prepared, TextRequest

_MAX_CHUNKS_AWAY = 6
_MAX_BYTES_AWAY = 1 << 20
# Deaths that nobody's row is charged with before it has died that often alone.
_KILLS_BEFORE_CHARGED = 3
# Whoever kills helpers is likely to be done at some time; one that fails by itself is not.
_FAILED_STARTS, _KILLED_STARTS = 3, 20
_LOAD_SECONDS = 120.0
# A timer of the kernel's ends a job that takes too long; this much later the helper must be stopped or stuck.
_GRACE_SECONDS = 5.0
_LOAD_ERRORS = {error.__name__: error for error in (UnsupportedModelError, ModelError, PackError)}


class TextService:
    """Turns requests into token ids in a process of its own. Every method may be called from any thread.

    Args:
        pack_path: the packed model whose tokenizer and template are used.
        description: raw `tokenizer.*` metadata instead of a pack.
        template: Jinja source for all chats instead of the model's own (`--chat-template`).
        now: the time templates are told; the present one by default. Give it to repeat a run.
        max_tokens: a text that must have more tokens is refused before it is tokenised.
        time_limit: seconds a row may take. memory_limit: bytes a row may take.
        on_death: told on the service's thread when a helper has died that nobody has closed.

    The constructor returns at once. What is wrong with the model is raised by the first call that needs it:
    UnsupportedModelError, ModelError or PackError; EngineError when the helper cannot run at all.
    """

    def __init__(
        self,
        pack_path: str | Path | None = None,
        *,
        description: Mapping[str, Any] | None = None,
        template: str | None = None,
        now: datetime.datetime | None = None,
        max_tokens: int | None = None,
        time_limit: float = 10.0,
        memory_limit: int = 1 << 30,
        on_death: Callable[[Death], None] | None = None,
    ) -> None:
        if (pack_path is None) == (description is None):
            raise ValueError("give either pack_path or description")
        self._settings = {
            "pack": None if pack_path is None else os.path.abspath(pack_path),
            "description": None if description is None else dict(description),
            "template": template,
            "now": (now or datetime.datetime.now()).isoformat(),
            "max_tokens": max_tokens,
            "time_limit": time_limit,
            "memory_limit": memory_limit,
            "parent": os.getpid(),
        }
        self._time_limit, self._memory_limit = time_limit, memory_limit
        self._on_death = on_death
        # Reentrant, as garbage collection anywhere may close a service that nobody has any more.
        self._lock = threading.RLock()
        self._waiting: deque[Chunk] = deque()
        self._away: deque[Chunk] = deque()
        self._facts: dict[str, Any] = {}
        self._loaded = threading.Event()
        self._failure: CoremillError | None = None
        self._failed_starts = 0
        self._num_jobs = 0
        self._num_answered = 0
        self._num_restarts = -1
        self._deadline = 0.0
        self._closed = False
        self._helper: HelperProcess | None = None
        self._ended = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="coremill-text", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C, while the thread goes on
            self.close(wait=False)
            raise

    # ---- for everybody ----

    def prepare(self, requests: Sequence[TextRequest]) -> list[Prepared | RequestError]:
        """Ids of each request, or what is wrong with it, in order."""
        return [Prepared(result) if isinstance(result, tuple) else result for result in self.submit(requests).result()]

    def count(self, requests: Sequence[TextRequest]) -> list[int | RequestError]:
        """Number of tokens of each request, or what is wrong with it, in order."""
        return self.submit(requests, "count").result()

    def render(self, requests: Sequence[TextRequest]) -> list[str | RequestError]:
        """The text of each chat as the template makes it, or what is wrong with it, in order."""
        return self.submit(requests, "render").result()

    def submit(self, requests: Sequence[TextRequest], kind: wire.Kind = "ids") -> Future[list[Any]]:
        """As prepare, count and render, without waiting: a future of tuples of ids (or counts, or texts) and
        RequestErrors."""
        self._check_usable()
        batch, chunks = make_chunks(requests, kind)
        with self._lock:
            self._check_usable()
            self._waiting.extend(chunks)
        self._wake_up()
        return batch.future

    @property
    def special(self) -> dict[str, int | None]:
        """Ids of "bos", "eos", "eot", "unknown" and "padding"; waits until the tokenizer is loaded."""
        return self._fact("special")

    @property
    def vocab_size(self) -> int:
        """Number of token ids; waits until the tokenizer is loaded."""
        return self._fact("vocab_size")

    @property
    def num_restarts(self) -> int:
        """How often the helper had to be started again."""
        return max(self._num_restarts, 0)

    @property
    def pid(self) -> int | None:
        """The helper's process id, None while there is none."""
        helper = self._helper
        return None if helper is None else helper.pid

    def close(self, wait: bool = True) -> None:
        """End the helper, and wait for that. Rows that are still waiting fail with EngineClosedError."""
        self._closed = True
        self._wake_up()
        if wait and self._settings["parent"] == os.getpid():
            self._thread.join()

    @property
    def is_own_thread(self) -> bool:
        """Whether this is called by a callback of a future of ours."""
        return threading.current_thread() is self._thread

    def __enter__(self) -> TextService:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- callers' side ----

    def _check_usable(self) -> None:
        if self._settings["parent"] != os.getpid():
            raise EngineError("the text service belongs to the process that made it: make a new one after a fork")
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._closed:
            raise EngineClosedError("the coordinator is closed")

    def _fact(self, name: str) -> Any:
        self._check_usable()
        self._loaded.wait()
        self._check_usable()
        return self._facts[name]

    def _wake_up(self) -> None:
        with self._lock:
            if not self._ended:
                os.eventfd_write(self._wake, 1)

    # ---- the service's thread ----

    def _run(self) -> None:
        try:
            while not self._closed and self._failure is None:
                self._turn()
        except BaseException as error:  # ours: the callers must not wait for ever
            self._failure = EngineError(f"the text service failed: {type(error).__name__}: {error}")
        self._finish()

    def _turn(self) -> None:
        """Start, sleep until something happens, act."""
        if self._helper is None and (self._waiting or not self._loaded.is_set()):
            self._start()
        self._send_chunks()
        helper = self._helper
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if helper is not None:
            poller.register(helper.output, select.POLLIN)
            if helper.unsent:
                poller.register(helper.input, select.POLLOUT)
        events = dict(poller.poll(self._poll_timeout()))
        if self._wake in events:
            os.eventfd_read(self._wake)
        if helper is None:
            return
        if helper.input in events:
            helper.write()
        if helper.output in events:
            alive, values = helper.read()
            for value in values:
                self._handle(value)
            if not alive:
                self._bury(helper.reap())
                return
        if self._is_busy() and time.monotonic() > self._deadline:
            self._bury(helper.kill())

    def _is_busy(self) -> bool:
        return self._helper is not None and (bool(self._away) or not self._helper.ready)

    def _poll_timeout(self) -> float | None:
        if not self._is_busy():
            return None
        return max(0.0, self._deadline - time.monotonic()) * 1000 + 1

    def _start(self) -> None:
        self._helper = HelperProcess(self._settings)
        self._num_answered = 0
        self._num_restarts += 1
        self._deadline = time.monotonic() + _LOAD_SECONDS

    def _send_chunks(self) -> None:
        helper = self._helper
        if helper is None or not helper.ready:
            return
        away_bytes = sum(chunk.num_bytes for chunk in self._away)
        while self._waiting and len(self._away) < _MAX_CHUNKS_AWAY and (not self._away or away_bytes < _MAX_BYTES_AWAY):
            with self._lock:
                chunk = self._waiting.popleft()
                while self._waiting and chunk.absorb(self._waiting[0]):
                    self._waiting.popleft()
            self._num_jobs += 1
            chunk.number = self._num_jobs
            helper.send(wire.pack_job(chunk.number, chunk.kind, [row.data for row in chunk.rows]))
            if not self._away:
                self._set_deadline()
            self._away.append(chunk)
            away_bytes += chunk.num_bytes

    def _set_deadline(self) -> None:
        self._deadline = time.monotonic() + self._time_limit + _GRACE_SECONDS

    def _handle(self, value: Any) -> None:
        if value[0] == "ready":
            self._helper.ready = True
            self._failed_starts = 0
            self._facts = value[1]
            self._loaded.set()
        elif value[0] == "failed":
            error = _LOAD_ERRORS.get(value[1])
            self._failure = error(value[2]) if error else EngineError(f"the text helper failed: {value[1]}: {value[2]}")
        else:
            chunk = self._away.popleft()
            if chunk.number != value[0]:
                raise EngineError(f"the text helper answered job {value[0]} instead of {chunk.number}")
            for row, answer in zip(chunk.rows, value[1], strict=True):
                row.batch.answer(row.position, wire.unpack_answer(answer))
            self._num_answered += 1
            self._set_deadline()

    def _bury(self, death: Death) -> None:
        """Charge whoever the helper died of; everything else that was on its way goes again."""
        was_ready, was_used = self._helper.ready, self._num_answered > 0
        self._helper = None
        if self._failure is not None:
            return
        if self._on_death is not None:
            call_back("on_death", self._on_death, death)
        if not was_ready:
            self._failed_starts += 1
            if self._failed_starts >= (_KILLED_STARTS if death.cause == "outside" else _FAILED_STARTS):
                self._failure = EngineError(f"the text helper cannot start: it {death.words}")
            return
        again = list(self._away)
        self._away.clear()
        if again:
            again[:1] = self._judge(again[0], death, was_used)
        with self._lock:
            self._waiting.extendleft(reversed(again))

    def _judge(self, chunk: Chunk, death: Death, was_used: bool) -> list[Chunk]:
        """What of the chunk that the helper died of is to be sent again. was_used: it was not its first."""
        if len(chunk.rows) > 1:
            return chunk.singles()
        chunk.kills += 1
        chunk.alone = True
        if death.cause in ("outside", "silence") and chunk.kills < _KILLS_BEFORE_CHARGED:
            return [chunk]
        # Memory that earlier rows left in pieces is not this row's fault.
        if death.cause == "memory" and was_used and chunk.kills == 1:
            return [chunk]
        row = chunk.rows[0]
        row.batch.answer(row.position, death.as_error(self._time_limit, self._memory_limit))
        return []

    def _finish(self) -> None:
        """Nothing will be answered any more: say so to everybody who waits."""
        if self._helper is not None:
            self._helper.kill()
            self._helper = None
        with self._lock:
            left = [*self._away, *self._waiting]
            self._away.clear()
            self._waiting.clear()
            error = self._failure or EngineClosedError("the coordinator was closed")
            self._ended = True
            os.close(self._wake)
        for future in {row.batch.future for chunk in left for row in chunk.rows}:
            if not future.done():
                future.set_exception(error)
        self._loaded.set()
