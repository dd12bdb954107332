"""What people and scripts see of a run, on stderr: plan, progress, workers, the end. Plain lines, a live view on
terminals, or one JSON object a line.

Texts that come from models or inputs pass through `printable` before they get here.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coremill.config.hostfiles import format_cpu_list
from coremill.coordinator.batch.plan import Plan, Setting, format_seconds, plan_lines, stats_plan
from coremill.coordinator.batch.runner import Progress, Reporter
from coremill.coordinator.view.screen import queue_line, sums_line
from coremill.coordinator.view.table import Line, cut_line, plain, worker_lines

if TYPE_CHECKING:
    from coremill.coordinator.batch.watch import RunWatch
    from coremill.coordinator.text.process import Death

PLAIN_SECONDS, TABLE_SECONDS = 5.0, 30.0
LOOK_SECONDS, LIVE_SECONDS = 1.0, 0.5
PLAIN_WIDTH = 120
_BAR_WIDTH = 30
_AT_WORK = ("running", "idle", "paused")


def share_done(progress: Progress, left: float | None) -> float | None:
    """How far this run is, 0 to 1: by time when `left` seconds are known, else by rows; None when nobody knows how
    many rows there are."""
    if progress.num_rows is None:
        return None
    num_rows = progress.num_rows - progress.num_skipped
    if num_rows <= 0:
        return 1.0
    if left:
        return progress.seconds / (progress.seconds + left)
    return min(1.0, (progress.num_results + progress.num_errors) / num_rows)


def progress_line(progress: Progress, view: dict[str, Any]) -> str:
    """A run in one line. view: its workers' rates and the time that is left."""
    done = progress.num_skipped + progress.num_results + progress.num_errors
    line = f"{done:,} rows"
    if progress.num_rows is not None:
        line = f"{done:,} of {'' if progress.input_ended else 'about '}{progress.num_rows:,} rows"
    if progress.num_errors:
        line += f", {progress.num_errors:,} failed"
    if view["paused"]:
        return f"{line}; paused"
    sums, left = view["totals"], view["queue"]["seconds_left"]
    rates = (sums["prefill_tokens_per_s"] or 0, sums["decode_tokens_per_s"] or 0)
    line += f"; {rates[0]:,.0f} prompt + {rates[1]:,.0f} new tokens/s"
    if progress.cached_tokens:
        line += f", {progress.cached_tokens / progress.prompt_tokens:.0%} of prompts cached"
    share = share_done(progress, left)
    if share is not None and left is not None:
        line += f"; {share:.0%} of the time, about {format_seconds(left)} left"
    return line


def worker_states(workers: list[dict[str, Any]]) -> str:
    """All workers of a view in a few words: sequences each of them steps, and those that are not at work."""
    there = [worker for worker in workers if worker["state"] in _AT_WORK]
    counts = [worker["active"] for worker in there]
    active = "+".join(map(str, counts)) if len(counts) <= 8 else f"{sum(counts)} on {len(counts)} workers"
    away = "".join(f", worker {worker['worker']} {worker['state']}" for worker in workers if worker not in there)
    return f"active {active or 0}{away}"


def worker_table(workers: list[dict[str, Any]], seconds: float, width: int) -> list[str]:
    """What each worker has done and holds, and what the columns say. seconds: since the counters began."""
    restarted = any(worker["restarts"] for worker in workers)
    head = ["worker", "cores", "prompt", "new", "tokens/s", "busy", "at once", "memory", "own"]
    rows = [(*head, "restarts") if restarted else tuple(head)]
    for worker in workers:
        cells = [*_name(worker), *_speed(worker, seconds), f"{worker['mean_batch']:.1f}"]
        cells += [_megabytes(worker["pss_bytes"]), _megabytes(worker["pss_private_bytes"])]
        rows.append((*cells, str(worker["restarts"])) if restarted else tuple(cells))
    caption = (
        "prompt, new: tokens read and written. at once: rows in a step. memory: resident, what workers share split "
        "between them; own: what is not shared."
    )
    return aligned(rows, width) + textwrap.wrap(caption, width, initial_indent="  ", subsequent_indent="  ")


def _name(worker: dict[str, Any]) -> tuple[str, str]:
    return str(worker["worker"]), format_cpu_list(tuple(worker["cores"]))


def _speed(worker: dict[str, Any], seconds: float) -> tuple[str, ...]:
    prefill, decode = worker["prefill_tokens"], worker["decode_tokens"]
    rate = _short((prefill + decode) / seconds) if seconds else "-"
    busy = f"{min(1.0, worker['busy_seconds'] / seconds):.0%}" if seconds else "-"
    return _short(prefill), _short(decode), rate, busy


def _short(number: float) -> str:
    return f"{number:,.0f}" if number < 1e6 else f"{number / 1e6:,.1f}M"


def _megabytes(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "-"
    return f"{num_bytes / (1 << 20):.0f} MiB" if num_bytes < 10 << 30 else f"{num_bytes / (1 << 30):,.1f} GiB"


def aligned(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Lines of a table, cells to the right, cut to the terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)) for row in rows)
    return [shortened_line(line, width) for line in lines]


class PlainReporter(Reporter):
    """Lines: the plan, progress every PLAIN_SECONDS and workers every TABLE_SECONDS, what happens to workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_look = self._next_line = 0.0
        self._next_table = TABLE_SECONDS
        self._stage = ("", -1)
        self._setting = Setting()
        self._format_note = ""
        self._watch: RunWatch | None = None

    def attach(self, setting: Setting, format_note: str, watch: RunWatch) -> None:
        """The engine is ready."""
        self._setting, self._format_note, self._watch = setting, format_note, watch

    def say(self, text: str) -> None:
        """One line, from any thread."""
        with self._lock:
            print(f"coremill: {text}", file=sys.stderr, flush=True)

    def tell(self, event: str, lines: Sequence[str], **fields: Any) -> None:
        """Something that has happened: in words here, by its name and fields in a log of JSON."""
        for line in lines:
            self.say(line)

    def stage(self, stage: str, done: int, total: int) -> None:
        """Progress of what precedes the first row; said at every quarter. total 0: nobody knows."""
        said = (stage, 4 * done // total if total else 0)
        if said != self._stage:
            self._stage = said
            self.tell("stage", [f"{stage}: {25 * said[1]} %" if total else stage], stage=stage, done=done, total=total)

    def plan(self, plan: Plan, num_rows: int | None, num_skipped: int) -> None:
        if self._watch is not None:
            self._watch.plan = plan
        lines = plan_lines(plan, self._setting, num_rows, num_skipped, self._format_note)
        self.tell("plan", lines, rows=num_rows, skipped=num_skipped, plan=stats_plan(plan))

    def progress(self, progress: Progress) -> None:
        now = progress.seconds
        if self._watch is None or now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        if not self._watch.look(progress) or now < self._next_line:
            return
        view = self._watch.view()
        if self._next_line:  # nothing has happened yet the first time
            self._tell_progress(progress, view)
        self._next_line = now + PLAIN_SECONDS

    def _tell_progress(self, progress: Progress, view: dict[str, Any]) -> None:
        lines = [f"{progress_line(progress, view)}; {worker_states(view['workers'])}"]
        if progress.seconds >= self._next_table:
            self._next_table = progress.seconds + TABLE_SECONDS
            lines += map(plain, worker_lines(view, PLAIN_WIDTH))
        self.tell("progress", lines, **view)

    def worker_event(self, event: dict[str, Any]) -> None:
        """As Engine's on_event; runs on the engine's thread."""
        worker, cause, lines = event["worker"], event.get("cause"), []
        if event["event"] == "worker_died":
            lines = [f"worker {worker} died: {cause}; it is started again, its rows go on"]
        elif event["event"] == "worker_retired":
            lines = [f"worker {worker} is not started again: {cause}; the others take its rows"]
        self.tell(event["event"], lines, **{name: event[name] for name in ("worker", "pid", "cause") if name in event})

    def helper_died(self, death: Death) -> None:
        """As TextService's on_death; runs on its thread."""
        line = f"the text helper died: {death.why}; it is started again, its rows go on"
        self.tell("helper_died", [line], cause=death.why)

    def summary(self, table: Sequence[str], lines: Sequence[str], stats: dict[str, Any], exit_code: int) -> None:
        """The end. table: of the workers; lines: the rest in words; stats: both as --stats writes them."""
        with self._lock:
            for line in table:
                print(line, file=sys.stderr)
        self.tell("summary", lines, exit_code=exit_code, text=list(lines), stats=stats)

    def close(self) -> None:
        """Ends the live view, if there is one."""


class LiveReporter(PlainReporter):
    """A view at the bottom of a terminal, redrawn in place; lines scroll above it."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def say(self, text: str) -> None:
        with self._lock:
            self._console.print(text)

    def stage(self, stage: str, done: int, total: int) -> None:
        share = done / total if total else 1.0
        self._draw([[(f"{stage} {_bar(share)} {share:.0%}" if total else stage, "")]])

    def progress(self, progress: Progress) -> None:
        if self._watch is None or progress.seconds < self._next_look:
            return
        self._next_look = progress.seconds + LIVE_SECONDS
        if not self._watch.look(progress):
            return
        view = self._watch.view()
        share = share_done(progress, view["queue"]["seconds_left"])
        width = max(20, self._console.width)
        lines: list[Line] = [] if share is None else [[(_bar(share), "")]]
        lines += [[("paused (p in coremill top goes on)", "bold yellow")]] if view["paused"] else []
        lines += [queue_line(view, width), sums_line(view, width)]
        # One line less than the terminal has, which would scroll otherwise.
        room = max(1, self._console.height - len(lines) - 4)
        self._draw([*lines, *worker_lines(view, width, most=room)])

    def close(self) -> None:
        self._live.stop()

    def _draw(self, lines: Sequence[Line]) -> None:
        from rich.text import Text

        width = max(20, self._console.width)
        text = Text("\n").join(Text.assemble(*cut_line(line, width)) for line in lines)
        with self._lock:
            self._live.update(text, refresh=True)


class JsonReporter(PlainReporter):
    """One JSON object a line: "time" (seconds since the epoch), "event", and the fields of that event.

    stage, plan, progress (coordinator/view/rates.py), worker_started, worker_ready, worker_died, worker_stopped,
    worker_retired, helper_died, message (a text), summary, profile, error; of `coremill up`: end.
    """

    def say(self, text: str) -> None:
        self.tell("message", [], text=text)

    def tell(self, event: str, lines: Sequence[str], **fields: Any) -> None:
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields})
        with self._lock:
            print(line, file=sys.stderr, flush=True)

    def summary(self, table: Sequence[str], lines: Sequence[str], stats: dict[str, Any], exit_code: int) -> None:
        super().summary([], lines, stats, exit_code)


def shortened_line(line: str, width: int) -> str:
    """A line of ours, alignment kept, cut to the terminal's width."""
    return line if len(line) <= width else line[: width - 1] + "…"


def _bar(share: float) -> str:
    filled = round(_BAR_WIDTH * min(1.0, share))
    return "█" * filled + "░" * (_BAR_WIDTH - filled)


def make_reporter(log_format: str = "text") -> PlainReporter:
    """The live view when stderr is a terminal that can redraw, else plain lines; "json": JSON lines in any case."""
    live = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return LiveReporter() if live and log_format != "json" else line_reporter(log_format)


def line_reporter(log_format: str = "text") -> PlainReporter:
    """Lines, whatever stderr is."""
    return JsonReporter() if log_format == "json" else PlainReporter()
