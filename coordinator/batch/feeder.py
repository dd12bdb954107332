"""From lines of input to sequences in the engine, on two threads.

    reader thread     line -> row: parsed, its custom_id checked, skipped when an earlier run finished it
    prepare thread    rows -> token ids (a few rows per call) -> engine

Both end by themselves at the end of the input, or when the window is closed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coremill.config.errors import RequestError, RunError
from coremill.config.request import (
    GenerationRequest,
    SamplingParams,
    SequenceRequest,
    SequenceResult,
    custom_id_of,
    decode_json,
    parse_row,
)
from coremill.config.request_fields import shown
from coremill.coordinator.admission import sequence_request
from coremill.coordinator.batch.plan import PlanWindow
from coremill.coordinator.batch.reader import LineReader, RawLine
from coremill.coordinator.batch.results import Record, Row, error_of_line
from coremill.coordinator.batch.rowtable import (
    IN_ERRORS,
    IN_RESULTS,
    SEEN,
    UNKNOWN_DIGEST,
    RowTable,
    line_key,
    row_key,
)
from coremill.coordinator.batch.window import Window

PREPARE_ROWS = 32
PREPARE_BYTES = 1 << 18
MAX_CHANGED_SHOWN = 20
_PROMPT_END_CHARS = 400

Prepare = Callable[[Sequence[GenerationRequest]], Sequence[tuple[int, ...] | RequestError]]
Submit = Callable[[SequenceRequest, Callable[[SequenceResult], None]], object]


@dataclass(frozen=True, slots=True)
class Rules:
    """What a run asks of every row.

    models: names a row may give in `model`, None: any; ctx: tokens of the longest request; defaults: for fields a
    row leaves out; chat: lines of plain text are messages of a user, behind the message `system` if there is one;
    arena_tokens: what the KV cache of all sequences together holds, None: not known.
    """

    models: frozenset[str] | None
    ctx: int
    defaults: SamplingParams
    run_seed: int = 0
    chat: bool = False
    system: str | None = None
    arena_tokens: int | None = None


@dataclass(slots=True)
class Finished:
    """A row with its outcome: a result, or an error, or the record of a row that was finished by an earlier run and
    waited for its turn. record: also of a row of this run that waits."""

    row: Row
    result: SequenceResult | None = None
    error: RequestError | None = None
    record: Record | None = None

    @property
    def failure(self) -> RequestError | None:
        """Why it has no result, whether it ran or not."""
        return self.error or (self.result.error if self.result else None)


@dataclass(frozen=True, slots=True)
class FirstRow:
    """One of the first rows of the input, to be shown at the end. prompt: the end of its text."""

    key: bytes
    custom_id: str
    prompt: str


@dataclass(slots=True)
class InputEnd:
    """There are no more lines; num_rows of those read get a line in this run. error: the input breaks off here."""

    num_rows: int
    error: RunError | None = None


@dataclass(slots=True)
class Broke:
    """A thread of the feeder cannot go on."""

    error: BaseException


class Intake:
    """Turns lines into rows and keeps count of what happened to each. Used by the reader thread alone.

    finished: flags of rows that need not run; keep: so many of the first rows are kept in `first`.
    """

    def __init__(
        self, table: RowTable, rules: Rules, text_format: bool, *, finished: int = IN_RESULTS | IN_ERRORS, keep: int = 0
    ) -> None:
        self._table = table
        self._rules = rules
        self._text_format = text_format
        self._finished = finished
        self._keep = keep
        self.first: list[FirstRow] = []
        self.num_read = self.num_admitted = self.num_skipped = self.num_changed = self.num_unrecorded = 0
        self.changed: list[tuple[int, str]] = []  # (line number, custom_id) of the first few

    def admit(self, line: RawLine, cost: int) -> tuple[Row, GenerationRequest | RequestError] | None:
        """The row of a line and its request, or why it has none. None when an earlier run finished the row."""
        self.num_read += 1
        custom_id, request = self._parse(line)
        key = row_key(custom_id)
        digest, flags = self._table.get(key)
        if flags & SEEN:
            if not isinstance(request, RequestError):
                request = RequestError("duplicate_custom_id", self._taken(line, custom_id), "custom_id")
            key = line_key(line.number)
            digest, flags = self._table.get(key)
        if len(self.first) < self._keep:
            self.first.append(FirstRow(key, custom_id, _prompt_end(request)))
        if flags & self._finished:
            self._skip(line, custom_id, digest)
            self._table.put(key, digest, flags | SEEN)
            return None
        self._table.put(key, line.digest, flags | SEEN)
        row = Row(line.number, self.num_admitted, custom_id, key, line.digest, cost)
        self.num_admitted += 1
        return row, request

    def _taken(self, line: RawLine, custom_id: str) -> str:
        if self._text_format or decode_json(line.data).get("custom_id") is None:
            taken = f"its automatic one, {shown(custom_id)}, is an earlier row's"
            return f"the row has no 'custom_id', and {taken}: give it one"
        return f"'custom_id' is {shown(custom_id)}: an earlier row has it already"

    def _skip(self, line: RawLine, custom_id: str, digest: bytes) -> None:
        self.num_skipped += 1
        if digest == UNKNOWN_DIGEST:
            self.num_unrecorded += 1
        elif digest != line.digest:
            self.num_changed += 1
            if len(self.changed) < MAX_CHANGED_SHOWN:
                self.changed.append((line.number, custom_id))

    def _parse(self, line: RawLine) -> tuple[str, GenerationRequest | RequestError]:
        """(custom_id, request or error). A custom_id that cannot be read is replaced as a missing one is."""
        custom_id = f"line-{line.number}"
        try:
            if line.error is not None:
                raise line.error
            if self._text_format:
                return custom_id, self._text_request(line.data, custom_id)
            decoded = decode_json(line.data)
            custom_id = custom_id_of(decoded, line.number)
            request = parse_row(decoded, line.number, self._rules.defaults)
            self._check_model(request.model)
            return custom_id, request
        except RequestError as error:
            return custom_id, error

    def _check_model(self, name: str | None) -> None:
        models = self._rules.models
        if name is None or models is None or name in models:
            return
        known = ", ".join(f"'{known}'" for known in sorted(models))
        problem = f"'model' is {shown(name)}: it must be one of {known}; --any-model accepts every name"
        raise RequestError("model_not_found", problem, "model")

    def _text_request(self, data: bytes, custom_id: str) -> GenerationRequest:
        try:
            prompt = data.decode()
        except UnicodeDecodeError as error:
            raise RequestError("invalid_utf8", f"not valid UTF-8 at byte {error.start} of the line") from None
        rules = self._rules
        if not rules.chat:
            return GenerationRequest(custom_id, "completion", None, prompt, rules.defaults)
        system = () if rules.system is None else ({"role": "system", "content": rules.system},)
        messages = (*system, {"role": "user", "content": prompt})
        return GenerationRequest(custom_id, "chat", messages, None, rules.defaults)


def _prompt_end(request: GenerationRequest | RequestError) -> str:
    """The end of a row's text, for people."""
    if isinstance(request, RequestError):
        return ""
    text = request.messages[-1]["content"] if request.messages else request.prompt
    return text[-_PROMPT_END_CHARS:] if isinstance(text, str) else f"{len(text)} token ids"


class Feeder:
    """Runs the two threads. Everything they have to say goes through `post`, from either thread or the engine's."""

    def __init__(
        self,
        lines: LineReader,
        intake: Intake,
        rules: Rules,
        *,
        prepare: Prepare,
        submit: Submit,
        post: Callable[[object], None],
        window: Window,
        waited: Callable[[bytes], Record | None],
    ) -> None:
        """waited: takes the record of a row that an earlier run finished and did not write."""
        self._waited = waited
        self._lines, self._intake, self._rules = lines, intake, rules
        self._prepare, self._submit, self._post, self._window = prepare, submit, post, window
        self._plan = PlanWindow()
        self._rows: queue.SimpleQueue[tuple[Row, GenerationRequest] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=f"coremill-{name}", daemon=True)
            for name, work in (("read", self._read), ("prepare", self._prepare_all))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self, timeout: float) -> None:
        """Waits for the threads after the window was closed; a call that is stuck elsewhere is left to die."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # re-raised by the main thread
            self._rows.put(None)
            self._post(Broke(error))

    def _read(self) -> None:
        error, ended = None, True
        try:
            ended = self._admit_all()
        except RunError as found:  # what is in front of it can be run
            error = found
        self._rows.put(None)
        if ended:
            self._post(InputEnd(self._intake.num_admitted, error))

    def _admit_all(self) -> bool:
        """False: the window was closed before the end of the input."""
        for line in self._lines:
            cost = len(line.data)
            if not self._window.acquire(cost):
                return False
            admitted = self._intake.admit(line, cost)
            if admitted is None:
                self._window.release(cost)
            elif isinstance(admitted[1], RequestError):
                self._post(Finished(admitted[0], error=admitted[1]))
            elif (record := self._waited(admitted[0].key)) is not None and record.digest == admitted[0].digest:
                self._post(Finished(admitted[0], error=error_of_line(record.line), record=record))
            else:
                self._rows.put(admitted)  # type: ignore[arg-type]
        # A pipe seems to end where its reading is interrupted.
        return self._lines.position() is not None or not self._window.closed

    def _prepare_all(self) -> None:
        ended = False
        while not ended:
            rows, ended = self._next_rows(self._plan.seconds_left())
            if rows:
                prepared = self._prepare([request for _, request in rows])
                for (row, request), ids in zip(rows, prepared, strict=True):
                    self._start(row, request, ids)
            if (plan := self._plan.finish(self._intake.num_read, ended)) is not None:
                self._post(plan)

    def _next_rows(self, timeout: float | None) -> tuple[list[tuple[Row, GenerationRequest]], bool]:
        """(the rows there are, up to a call's worth; True at the end of the input). Waits for the first."""
        rows: list[tuple[Row, GenerationRequest]] = []
        size = 0
        try:
            while len(rows) < PREPARE_ROWS and size < PREPARE_BYTES:
                item = self._rows.get(timeout=timeout) if not rows else self._rows.get_nowait()
                if item is None:
                    return rows, True
                rows.append(item)
                size += item[0].cost
        except queue.Empty:
            pass  # what is here goes first: the next row may be long in coming
        return rows, False

    def _start(self, row: Row, request: GenerationRequest, ids: tuple[int, ...] | RequestError) -> None:
        try:
            if isinstance(ids, RequestError):
                raise ids
            row.kind, row.num_prompt = request.kind, len(ids)
            sequence = sequence_request(request, ids, self._rules.ctx, self._rules.run_seed)
        except RequestError as error:
            self._plan.add_unfit(error)
            self._post(Finished(row, error=error))
            return
        arena_tokens = self._rules.arena_tokens
        fits = arena_tokens is None or len(ids) + sequence.max_tokens - 1 <= arena_tokens
        self._plan.add(sequence, fits=fits, unlimited=request.kind == "chat" and request.sampling.max_tokens is None)
        self._submit(sequence, lambda result: self._post(Finished(row, result=result)))
