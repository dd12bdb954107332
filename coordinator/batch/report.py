"""What people see of a run, on stderr: plan, progress, workers. Plain lines, or a live view on terminals.

Texts that come from models or inputs pass through `printable` before they get here.
"""

from __future__ import annotations

import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coremill.config.printable import printable, shortened
from coremill.coordinator.batch.estimate import Count, seconds_left
from coremill.coordinator.batch.feeder import FirstRow
from coremill.coordinator.batch.plan import Plan, Setting, format_seconds, plan_lines
from coremill.coordinator.batch.runner import Progress, Reporter

PLAIN_SECONDS = 5.0
_BAR_WIDTH = 30
_END_WIDTH = len("length")
_MAX_ANSWER_LINES = 4

Style = Callable[[str, str], str]


class Rates:
    """Tokens per second since a few seconds ago, from growing counters."""

    SPAN = 3.0

    def __init__(self) -> None:
        self._samples: list[tuple[float, int, int]] = []

    def add(self, now: float, prefill: int, decode: int) -> tuple[float, float]:
        """(prefill, decode) tokens per second."""
        self._samples.append((now, prefill, decode))
        while len(self._samples) > 2 and now - self._samples[1][0] >= self.SPAN:
            self._samples.pop(0)
        then, prefill_then, decode_then = self._samples[0]
        span = max(now - then, 1e-3)
        return (prefill - prefill_then) / span, (decode - decode_then) / span


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


def progress_line(
    progress: Progress, share: float | None, rates: tuple[float, float], left: float | None = None
) -> str:
    """left: seconds, None when nobody can tell."""
    done = progress.num_skipped + progress.num_results + progress.num_errors
    line = f"{done:,} rows"
    if progress.num_rows is not None:
        line = f"{done:,} of {'' if progress.input_ended else 'about '}{progress.num_rows:,} rows"
    if progress.num_errors:
        line += f", {progress.num_errors:,} failed"
    line += f"; {rates[0]:,.0f} prompt + {rates[1]:,.0f} new tokens/s"
    if progress.cached_tokens:
        line += f", {progress.cached_tokens / progress.prompt_tokens:.0%} of prompts cached"
    if share is not None and left is not None:
        line += f"; {share:.0%}, about {format_seconds(left)} left"
    return line


def worker_states(workers: list[dict[str, Any]]) -> str:
    """All workers in a few words: sequences each of them steps, and those that are not at work."""
    ready = [worker for worker in workers if worker["state"] == "ready"]
    counts = [worker["active"] for worker in ready]
    active = "+".join(map(str, counts)) if len(counts) <= 8 else f"{sum(counts)} on {len(counts)} workers"
    away = "".join(f", worker {worker['worker']} {worker['state']}" for worker in workers if worker not in ready)
    return f"active {active or 0}{away}"


def live_table(workers: list[dict[str, Any]], seconds: float, width: int) -> list[str]:
    """What each worker is doing, under a heading. seconds: since the counters began."""
    rows = [("worker", "cores", "state", "active", "prompt", "new", "tokens/s", "busy")]
    rows += [(*_name(worker), worker["state"], str(worker["active"]), *_speed(worker, seconds)) for worker in workers]
    return aligned(rows, width)


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
    from coremill.config.hostfiles import format_cpu_list

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
    """Lines: the plan, progress every PLAIN_SECONDS, what happens to workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_line = 0.0
        self._packing = ("", -1)
        self._rates = Rates()
        self._plan: Plan | None = None
        self._setting = Setting()
        self._format_note = ""
        self._stats: Callable[[], dict[str, Any]] | None = None

    def attach(self, setting: Setting, format_note: str, stats: Callable[[], dict[str, Any]]) -> None:
        """The engine is ready. stats: Engine.stats without measuring."""
        self._setting, self._format_note, self._stats = setting, format_note, stats

    def say(self, text: str) -> None:
        """One line, from any thread."""
        with self._lock:
            print(f"coremill: {text}", file=sys.stderr, flush=True)

    def packing(self, stage: str, done: int, total: int) -> None:
        """Progress of what precedes the first run of a model; said at every quarter. total 0: nobody knows."""
        said = (stage, 4 * done // total if total else 0)
        if said != self._packing:
            self._packing = said
            self.say(f"{stage}: {25 * said[1]} %" if total else stage)

    def plan(self, plan: Plan, num_rows: int | None, num_skipped: int) -> None:
        self._plan = plan
        for line in plan_lines(plan, self._setting, num_rows, num_skipped, self._format_note):
            self.say(line)

    def progress(self, progress: Progress) -> None:
        if progress.seconds < self._next_line:
            return
        line, _, workers = self._state(progress)
        if self._next_line:  # nothing has happened yet the first time
            self.say(f"{line}; {worker_states(workers)}")
        self._next_line = progress.seconds + PLAIN_SECONDS

    def worker_event(self, event: dict[str, Any]) -> None:
        """As Engine's on_event; runs on the engine's thread."""
        if event["event"] == "worker_died":
            self.say(f"worker {event['worker']} died: {event.get('cause')}; it is started again, its rows go on")
        elif event["event"] == "worker_retired":
            self.say(f"worker {event['worker']} is not started again: {event.get('cause')}; the others take its rows")

    def close(self) -> None:
        """Ends the live view, if there is one."""

    def _state(self, progress: Progress) -> tuple[str, float | None, list[dict[str, Any]]]:
        """(line of text, share done, workers)."""
        workers = self._stats()["workers"] if self._stats else []
        names = ("prefill_tokens", "decode_tokens", "active")
        prefill, decode, active = (sum(worker[name] for worker in workers) for name in names)
        rates = self._rates.add(time.monotonic(), prefill, decode)
        left = None
        if progress.num_rows is not None:
            num_left = progress.num_rows - progress.num_skipped - progress.num_results - progress.num_errors
            done = (progress.num_results, prefill, decode, progress.completion_tokens, rates[1])
            left = seconds_left(Count(progress.seconds, num_left, active, *done), self._plan)
        share = share_done(progress, left)
        return progress_line(progress, share, rates, left), share, workers


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

    def packing(self, stage: str, done: int, total: int) -> None:
        share = done / total if total else 1.0
        self._draw([f"{stage} {_bar(share)} {share:.0%}" if total else stage])

    def progress(self, progress: Progress) -> None:
        line, share, workers = self._state(progress)
        table = live_table(workers, progress.seconds, max(20, self._console.width))
        self._draw(([] if share is None else [_bar(share)]) + [line, *table])

    def close(self) -> None:
        self._live.stop()

    def _draw(self, lines: list[str]) -> None:
        from rich.text import Text

        width = max(20, self._console.width)
        with self._lock:
            self._live.update(Text("\n".join(shortened_line(line, width) for line in lines)), refresh=True)


def shortened_line(line: str, width: int) -> str:
    """A line of ours, alignment kept, cut to the terminal's width."""
    return line if len(line) <= width else line[: width - 1] + "…"


def _bar(share: float) -> str:
    filled = round(_BAR_WIDTH * min(1.0, share))
    return "█" * filled + "░" * (_BAR_WIDTH - filled)


def make_reporter() -> PlainReporter:
    """The live view when stderr is a terminal that can redraw, else plain lines."""
    live = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return LiveReporter() if live else PlainReporter()


def result_lines(
    first: Sequence[FirstRow], found: Mapping[bytes, dict[str, Any]], width: int, style: Style = lambda kind, text: text
) -> list[str]:
    """Rows for people: custom_id, how each ended, the end of its prompt, its answer (up to _MAX_ANSWER_LINES lines).

    found: lines of the result and error files by row key; a row without one is not finished. style: given
    "head", "id", "length", "failed" or "answer", and a text of the final width, returns it coloured.
    """
    names = [shortened(row.custom_id, 24) for row in first]
    column = max(map(len, ["row", *names]))
    prompt = max(16, (width - column - _END_WIDTH - 6) * 2 // 5)
    answer = max(16, width - column - _END_WIDTH - prompt - 6)
    head = f"{'row'.ljust(column)}  {'end'.ljust(_END_WIDTH)}  {'...prompt'.ljust(prompt)}  answer"
    lines = [style("head", head)]
    for name, row in zip(names, first, strict=True):
        end, text = _end_and_text(found.get(row.key))
        pieces = textwrap.wrap(text, answer, max_lines=_MAX_ANSWER_LINES, placeholder="…") or [""]
        kind = end if end in ("length", "failed") else "end"
        lines.append(
            f"{style('id', name.ljust(column))}  {style(kind, end.ljust(_END_WIDTH))}  "
            f"{_tail(row.prompt, prompt).ljust(prompt)}  {style('answer', pieces[0])}"
        )
        indent = " " * (column + _END_WIDTH + prompt + 6)
        lines += [indent + style("answer", piece) for piece in pieces[1:]]
    return lines


def _end_and_text(row: dict[str, Any] | None) -> tuple[str, str]:
    if row is None:
        return "-", ""
    if row["error"] is not None:
        return "failed", printable(f"{row['error']['code']}: {row['error']['message']}")
    choice = row["response"]["body"]["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return choice["finish_reason"], printable(text[:4000]).strip()


def _tail(text: str, width: int) -> str:
    line = printable(text).strip()
    return line if len(line) <= width else "…" + line[len(line) - width + 1 :]
