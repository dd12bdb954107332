"""What people see of a run, on stderr: plan, progress, workers. Plain lines, or a live view on terminals.

Texts that come from models or inputs pass through `printable` before they get here.
"""

from __future__ import annotations

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


def progress_line(progress: Progress, rates: tuple[float, float]) -> str:
    done = progress.num_skipped + progress.num_results + progress.num_errors
    if progress.num_rows is None:
        rows = f"{done:,} rows"
    else:
        about = "" if progress.input_ended else "about "
        rows = f"{done:,} of {about}{progress.num_rows:,} rows ({_share(done, progress.num_rows):.0%})"
    errors = f", {progress.num_errors:,} failed" if progress.num_errors else ""
    left = seconds_left(progress)
    ends = f", about {format_seconds(left)} left" if left is not None else ""
    return f"{rows}{errors}; {rates[0]:,.0f} prompt + {rates[1]:,.0f} new tokens/s{ends}"


def seconds_left(progress: Progress) -> float | None:
    """By the pace of this run's rows; None until there is one."""
    finished = progress.num_results + progress.num_errors
    if progress.num_rows is None or progress.num_results < 3:
        return None
    left = progress.num_rows - progress.num_skipped - finished
    return max(0.0, progress.seconds / finished * left)


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


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


class PlainReporter(Reporter):
    """Lines: the plan, progress every PLAIN_SECONDS, what happens to workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_line = 0.0
        self._packing = -1
        self._rates = Rates()
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
        for line in plan_lines(plan, self._setting, num_rows, num_skipped, self._format_note):
            self.say(line)

    def progress(self, progress: Progress) -> None:
        if progress.seconds < self._next_line:
            return
        if self._next_line:
            self.say(progress_line(progress, self._sample(self._workers())))
        else:
            self._sample(self._workers())
        self._next_line = progress.seconds + PLAIN_SECONDS

    def worker_event(self, event: dict[str, Any]) -> None:
        """As Engine's on_event; runs on the engine's thread."""
        if event["event"] in ("worker_died", "worker_retired"):
            what = "died" if event["event"] == "worker_died" else "is not started again"
            self.say(f"worker {event['worker']} {what}: {event.get('cause')}")

    def close(self) -> None:
        """Ends the live view, if there is one."""

    def _workers(self) -> list[dict[str, Any]]:
        return self._stats()["workers"] if self._stats else []

    def _sample(self, workers: list[dict[str, Any]]) -> tuple[float, float]:
        totals = (sum(worker[name] for worker in workers) for name in ("prefill_tokens", "decode_tokens"))
        return self._rates.add(time.monotonic(), *totals)


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
            self._console.print(text, soft_wrap=True)

    def packing(self, stage: str, done: int, total: int) -> None:
        self._draw([f"{stage} {_bar(_share(done, total))} {_share(done, total):.0%}"])

    def progress(self, progress: Progress) -> None:
        workers = self._workers()
        line = progress_line(progress, self._sample(workers))
        if progress.num_rows is not None:
            done = progress.num_skipped + progress.num_results + progress.num_errors
            line = f"{_bar(_share(done, progress.num_rows))} {line}"
        self._draw([line, *worker_table(workers, progress.seconds)])

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
    """The live view when stderr is a terminal, else plain lines."""
    return LiveReporter() if sys.stderr.isatty() else PlainReporter()


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
