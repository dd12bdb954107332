"""The main thread of a run: takes what has finished, writes it, reports, and knows when to stop.

feeder threads --submit--> engine --on_done--> mailbox --> this loop --> files
     ^                                                        |
     +---------------------- window (bounded) <---------------+
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from coremill.config.errors import EngineError, RequestError, RunError
from coremill.coordinator.batch.feeder import (
    Broke,
    Feeder,
    Finished,
    FirstRow,
    InputEnd,
    Intake,
    Prepare,
    Rules,
    Submit,
)
from coremill.coordinator.batch.plan import Plan
from coremill.coordinator.batch.reader import LineReader
from coremill.coordinator.batch.results import LineMaker, Record, Row
from coremill.coordinator.batch.rowtable import IN_ERRORS, IN_RESULTS, SEEN, RowTable
from coremill.coordinator.batch.window import InputOrder, Window
from coremill.coordinator.batch.writer import ResultFiles
from coremill.coordinator.engine import NOT_THE_REQUESTS_FAULT

# Of input lines in flight: their token ids take some ten times as much.
WINDOW_BYTES = 8 << 20
TICK_SECONDS = 0.25
MAX_FAILURES_SHOWN = 3


@dataclass(slots=True)
class Progress:
    """Counts of a run, growing. Rows of the input: num_read, of which num_skipped were finished before; num_results
    and num_errors are what this run wrote. num_rows: how many there are in all; None: not known (a pipe)."""

    num_read: int = 0
    num_skipped: int = 0
    num_results: int = 0
    num_errors: int = 0
    num_rows: int | None = None
    input_ended: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed row, for people."""

    line: int
    custom_id: str
    error: RequestError


@dataclass(slots=True)
class Outcome:
    """How a run ended. stopped: the signal that stopped it, or "strict"; None: the whole input is done.

    results_before, errors_before: lines in the files when it began, of which num_gone belong to rows that the
    input no longer has. error_codes: count of each code of the errors written now; failures: the first of them.
    first: the first rows of the input, as many as were asked for. idle: there was nothing to run.
    """

    progress: Progress
    plan: Plan | None = None
    stopped: signal.Signals | str | None = None
    results_before: int = 0
    errors_before: int = 0
    num_gone: int = 0
    num_dropped_errors: int = 0
    num_changed: int = 0
    num_unrecorded: int = 0
    changed: list[tuple[int, str]] = field(default_factory=list)
    error_codes: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    first: list[FirstRow] = field(default_factory=list)
    idle: bool = False


class Reporter:
    """Told what happens, on the main thread. This one keeps quiet."""

    def plan(self, plan: Plan, num_rows: int | None, num_skipped: int) -> None: ...

    def progress(self, progress: Progress) -> None: ...


class Runner:
    """One run over an input that is open, into files that are open, with an engine that is ready.

    retry: rows that failed in earlier runs run again. strict: the first row that fails ends the run.
    keep: so many of the input's first rows are remembered for the outcome. cancelled: custom_ids of rows that somebody
    ends by hand, growing; they become errors, whereas others that end "cancelled" are left for the next run.
    """

    def __init__(
        self,
        lines: LineReader,
        files: ResultFiles,
        table: RowTable,
        rules: Rules,
        maker: LineMaker,
        *,
        prepare: Prepare,
        submit: Submit,
        window_rows: int = 256,
        window_bytes: int = WINDOW_BYTES,
        in_order: bool = False,
        retry: bool = False,
        strict: bool = False,
        keep: int = 0,
        reporter: Reporter | None = None,
        interrupt_input: Callable[[], None] = lambda: None,
        cancelled: Collection[str] = (),
    ) -> None:
        self._files, self._table, self._maker = files, table, maker
        self._order = InputOrder() if in_order else None
        self._retry, self._strict = retry, strict
        self._reporter = reporter or Reporter()
        self._cancelled = cancelled
        self._position, self._interrupt_input = lines.position, interrupt_input
        self._mail: queue.SimpleQueue = queue.SimpleQueue()
        self._window = Window(window_rows, window_bytes)
        self._intake = Intake(table, rules, lines.format == "text", keep=keep)
        self._feeder = Feeder(
            lines,
            self._intake,
            rules,
            prepare=prepare,
            submit=submit,
            post=self._mail.put,
            window=self._window,
            waited=lambda key: self._files.waited.pop(key, None),
        )
        self._progress = Progress()
        self._outcome = Outcome(self._progress)
        self._expected: int | None = None
        self._input_error: RunError | None = None
        self._num_finished = 0

    def run(self) -> Outcome:
        """Until the input is done or a signal asks to stop. Errors: RunError, EngineError and what the feeder met;
        whatever finished before is in the files then."""
        outcome, table = self._outcome, self._table
        outcome.results_before, outcome.errors_before = table.count(IN_RESULTS), table.count(IN_ERRORS)
        num_retried = outcome.errors_before if self._retry else 0
        if self._retry:
            self._files.forget_errors()
            outcome.errors_before = 0
        self._started = time.monotonic()
        try:
            with self._signals():
                self._feeder.start()
                self._loop()
                self._count()
                if self._input_error is not None and self._outcome.stopped is None:
                    raise RunError(f"{self._input_error}; the rows before it are done") from self._input_error
        finally:
            self._window.close()
            self._interrupt_input()
            self._feeder.join(0.3)
        if outcome.stopped is not None:
            self._note_input_end()
        else:
            self._files.forget_waited()
            outcome.num_gone = table.count(IN_RESULTS, without=SEEN) + table.count(IN_ERRORS, without=SEEN)
            outcome.num_dropped_errors = num_retried and table.count(0, without=SEEN | IN_RESULTS | IN_ERRORS)
        return outcome

    def _loop(self) -> None:
        next_tick = 0.0
        # The plan is the last thing the feeder says.
        while self._num_finished != self._expected or self._outcome.plan is None:
            finished = self._take(max(0.0, next_tick - time.monotonic()))
            if finished:
                self._write(finished)
            if self._outcome.stopped is not None:
                return
            if time.monotonic() >= next_tick:
                self._count()
                self._reporter.progress(self._progress)
                next_tick = time.monotonic() + TICK_SECONDS

    def _take(self, timeout: float) -> list[Finished]:
        """Everything in the mailbox, after waiting for something to come. Broken threads raise here, once what
        finished before has been written."""
        finished: list[Finished] = []
        try:
            mail = self._mail.get(timeout=timeout)
            while True:
                match mail:
                    case Finished():
                        finished.append(mail)
                    case InputEnd(num_rows, error):
                        self._expected, self._input_error = num_rows, error
                    case Plan():
                        self._outcome.plan = mail
                        self._count()
                        self._reporter.plan(mail, self._progress.num_rows, self._progress.num_skipped)
                    case signal.Signals():
                        self._outcome.stopped = mail
                    case Broke(error):
                        self._write(finished)
                        raise error
                mail = self._mail.get_nowait()
        except queue.Empty:
            return finished

    def _write(self, finished: list[Finished]) -> None:
        """Writes rows; raises EngineError after the others when some came back because the engine is gone."""
        lost = None
        done: list[Finished] = []
        for item in finished:
            if item.record is not None and item.failure is not None:
                self._count_failure(item.row, item.failure)
            if item.failure is not None and item.failure.code == "cancelled" and item.row.custom_id in self._cancelled:
                item.error = RequestError("cancelled", "the row was cancelled by hand while the run was going on")
            elif item.failure is not None and item.failure.code in NOT_THE_REQUESTS_FAULT:  # left for the next run
                lost = item.failure
                continue
            done.append(item)
        ready = done if self._order is None else list(self._order.take(done))
        if self._order is not None and not self._strict:  # which may drop what fails
            self._hold([item for item in done if not self._order.has_given(item.row)])
        if self._strict and (failed := [item for item in ready if item.failure is not None]):
            first = min(failed, key=lambda item: item.row.ordinal)
            ready = [item for item in ready if item.failure is None or item is first]
            self._outcome.stopped = "strict"
        if ready:
            self._files.write([item.record or self._record(item) for item in ready])
        for item in ready:
            self._window.release(item.row.cost)
            self._progress.num_errors += item.failure is not None
            self._progress.num_results += item.failure is None
        self._num_finished += len(ready)
        if lost is not None and self._outcome.stopped is None:
            raise EngineError(lost.message)

    def _hold(self, items: list[Finished]) -> None:
        for item in items:
            item.record = item.record or self._record(item)
        if items:
            self._files.hold([item.record for item in items])

    def _record(self, item: Finished) -> Record:
        row, result, error, progress = item.row, item.result, item.failure, self._progress
        if error is not None:
            self._count_failure(row, error)
            line = self._maker.error_line(row, error, result)
        else:
            line = self._maker.result_line(row, result)
        if result is not None:
            progress.prompt_tokens += row.num_prompt
            progress.cached_tokens += result.cached_tokens
            progress.completion_tokens += len(result.token_ids)
        return Record(row.key, row.digest, error is not None, line)

    def _count_failure(self, row: Row, error: RequestError) -> None:
        codes, failures = self._outcome.error_codes, self._outcome.failures
        codes[error.code] = codes.get(error.code, 0) + 1
        if len(failures) < MAX_FAILURES_SHOWN:
            failures.append(Failure(row.number, row.custom_id, error))

    def _note_input_end(self) -> None:
        """After a stop: whether the reader had come to the end by then, which its last letter says."""
        while not self._mail.empty():
            match self._mail.get_nowait():
                case InputEnd(num_rows, None):
                    self._expected = num_rows
        self._count()

    def _count(self) -> None:
        """Brings the counts of the reader thread into the progress and extrapolates the number of rows."""
        progress, intake = self._progress, self._intake
        progress.num_read, progress.num_skipped = intake.num_read, intake.num_skipped
        progress.input_ended = self._expected is not None
        progress.seconds = time.monotonic() - self._started
        position = self._position()
        if progress.input_ended:
            progress.num_rows = progress.num_read
        elif position is not None and position[0]:
            progress.num_rows = max(progress.num_read, round(progress.num_read * position[1] / position[0]))
        outcome = self._outcome
        outcome.num_changed, outcome.num_unrecorded = intake.num_changed, intake.num_unrecorded
        outcome.changed, outcome.first = intake.changed, intake.first

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """First Ctrl-C (or SIGTERM): a letter to the loop. Second: the default, which ends the process at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, _frame: object) -> None:
            for each in before:
                signal.signal(each, signal.SIG_DFL)
            self._mail.put(signal.Signals(number))  # SimpleQueue.put may be called from a handler

        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, stop)
        try:
            yield
        finally:
            if not isinstance(self._outcome.stopped, signal.Signals):
                for number, handler in before.items():
                    signal.signal(number, handler)
