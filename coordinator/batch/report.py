"""What people see of a run, on stderr: plan, progress, workers. Plain lines, or a live view on terminals.

Texts that come from models or inputs pass through `printable` before they get here.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from coremill.config.printable import shortened
from coremill.coordinator.batch.plan import Plan, Setting, format_seconds, plan_lines
from coremill.coordinator.batch.runner import Progress, Reporter

PLAIN_SECONDS = 5.0
_BAR_WIDTH = 30


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


def share_done(progress: Progress, plan: Plan | None, num_tokens: int) -> float | None:
    """How far this run is, 0 to 1; None when nobody knows how many rows there are.

    By rows or by tokens, whichever is further: rows end together when they are equally long, and tokens are counted
    against an upper bound. num_tokens: computed by this run so far.
    """
    if progress.num_rows is None:
        return None
    num_rows = progress.num_rows - progress.num_skipped
    if num_rows <= 0:
        return 1.0
    share = (progress.num_results + progress.num_errors) / num_rows
    if plan is not None and plan.num_rows:
        planned = (plan.prompt_tokens + plan.max_new_tokens) / plan.num_rows * num_rows
        share = max(share, num_tokens / planned)
    return min(1.0, share)


def progress_line(progress: Progress, share: float | None, rates: tuple[float, float]) -> str:
    done = progress.num_skipped + progress.num_results + progress.num_errors
    line = f"{done:,} rows"
    if progress.num_rows is not None:
        line = f"{done:,} of {'' if progress.input_ended else 'about '}{progress.num_rows:,} rows"
    if progress.num_errors:
        line += f", {progress.num_errors:,} failed"
    line += f"; {rates[0]:,.0f} prompt + {rates[1]:,.0f} new tokens/s"
    if share is not None and share > 0.02:
        line += f"; {share:.0%}, about {format_seconds(progress.seconds * (1 - share) / share)} left"
    return line


def worker_states(workers: list[dict[str, Any]]) -> str:
    """All workers in a few words: sequences each of them steps, and those that are not at work."""
    ready = [worker for worker in workers if worker["state"] == "ready"]
    counts = [worker["active"] for worker in ready]
    active = "+".join(map(str, counts)) if len(counts) <= 8 else f"{sum(counts)} on {len(counts)} workers"
    away = "".join(f", worker {worker['worker']} {worker['state']}" for worker in workers if worker not in ready)
    return f"active {active or 0}{away}"


def worker_table(workers: list[dict[str, Any]], seconds: float) -> list[str]:
    """One line per worker of Engine.stats(), under a heading. seconds: since the counters began."""
    from coremill.config.memory import format_size

    head = (
        "worker",
        "cores",
        "state",
        "active",
        "prefill",
        "decode",
        "tokens/s",
        "busy",
        "batch",
        "PSS",
        "own",
        "starts",
    )
    rows = [head]
    for worker in workers:
        tokens = worker["prefill_tokens"] + worker["decode_tokens"]
        pss, own = worker["pss_bytes"], worker["pss_private_bytes"]
        rows.append(
            (
                str(worker["worker"]),
                ",".join(map(str, worker["cores"])),
                worker["state"],
                str(worker["active"]),
                f"{worker['prefill_tokens']:,}",
                f"{worker['decode_tokens']:,}",
                f"{tokens / seconds:,.0f}" if seconds else "-",
                f"{min(1.0, worker['busy_seconds'] / seconds):.0%}" if seconds else "-",
                f"{worker['mean_batch']:.1f}",
                "-" if pss is None else format_size(pss),
                "-" if own is None else format_size(own),
                str(1 + worker["restarts"]),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


class PlainReporter(Reporter):
    """Lines: the plan, progress every PLAIN_SECONDS, what happens to workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_line = 0.0
        self._packing = -1
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
        """Progress of what precedes the first run of a model; said at every quarter."""
        quarter = 4 * done // total if total else 0
        if quarter != self._packing:
            self._packing = quarter
            self.say(f"{stage}: {25 * quarter} %")

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
        if event["event"] in ("worker_died", "worker_retired"):
            what = "died" if event["event"] == "worker_died" else "is not started again"
            self.say(f"worker {event['worker']} {what}: {event.get('cause')}")

    def close(self) -> None:
        """Ends the live view, if there is one."""

    def _state(self, progress: Progress) -> tuple[str, float | None, list[dict[str, Any]]]:
        """(line of text, share done, workers)."""
        workers = self._stats()["workers"] if self._stats else []
        prefill, decode = (sum(worker[name] for worker in workers) for name in ("prefill_tokens", "decode_tokens"))
        share = share_done(progress, self._plan, prefill + decode)
        return progress_line(progress, share, self._rates.add(time.monotonic(), prefill, decode)), share, workers


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
        self._draw([f"{stage} {_bar(share)} {share:.0%}"])

    def progress(self, progress: Progress) -> None:
        line, share, workers = self._state(progress)
        self._draw(([] if share is None else [_bar(share)]) + [line, *worker_table(workers, progress.seconds)])

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


def result_lines(rows: list[dict[str, Any]], width: int) -> list[str]:
    """Results for people: custom_id and text of each, on one line of the given width."""
    texts = []
    for row in rows:
        choice = row["response"]["body"]["choices"][0]
        texts.append(choice["text"] if "text" in choice else choice["message"]["content"])
    names = [shortened(row["custom_id"], 32) for row in rows]
    column = max(map(len, names), default=0)
    return [
        f"{name.ljust(column)}  {shortened(text, max(10, width - column - 2))}"
        for name, text in zip(names, texts, strict=True)
    ]
