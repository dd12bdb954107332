"""`coremill run`: a file of prompts in, a file of results out."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from coremill.config.settings import Settings
from coremill.tools.cli import EXIT_INTERRUPTED, describe
from coremill.tools.options import Verb, takes

if TYPE_CHECKING:
    from coremill.coordinator.batch.feeder import FirstRow
    from coremill.coordinator.batch.report import PlainReporter

_EXAMPLES = [
    ("coremill run prompts.jsonl -m smollm2 -o results.jsonl", "run a file; again: resume it"),
    ("coremill run questions.txt -m model.gguf -o answers.jsonl --chat --max-tokens 200", "plain text, a chat a line"),
    ("coremill run openai-batch.jsonl -m model.gguf -o out.jsonl --any-model", "rows written for another service"),
    ("zcat big.jsonl.gz | coremill run - -m model.gguf -o out.jsonl --in-order", "from a pipe, results in input order"),
    ("coremill run prompts.jsonl -m smollm2 -o results.jsonl --retry-errors", "failed rows once more"),
]


@click.command(cls=Verb, examples=_EXAMPLES)
@click.argument("input", metavar="IN")
@takes("run")
def command(input: str, settings: Settings) -> int:
    """Run the prompts of the file IN (- for standard input) through a model.

    IN has one request a line: OpenAI batch lines (custom_id, method, url, body), or objects with `prompt` or
    `messages` and sampling fields, or plain text: without --chat, each line is a text that the model continues by up
    to 16 tokens. Files ending in .gz and .zst are read too.

    Each finished row is appended to OUT at once, each failed one to the error file. The same command again goes on
    where the last run stopped, however it ended; OUT.journal remembers what the results depend on. --in-order keeps
    the input's order among the rows that one command runs.

    Ctrl-C stops within a second and keeps what is finished; a second Ctrl-C kills. `coremill top` shows the run from
    another terminal, and pauses it, cancels rows or changes the number of workers.

    Exit code: 0 all rows succeeded, 1 the run could not go on, 2 wrong options, 3 some rows failed, 4 OUT belongs to
    a run with other settings or rows, 5 some rows changed since they were finished and --keep-changed was given,
    6 --strict stopped the run, 130 Ctrl-C, 143 SIGTERM.
    """
    from coremill.coordinator.batch.report import make_reporter

    as_json = settings["log_format"] == "json"
    reporter = make_reporter(settings["log_format"])
    try:
        return _run(input, settings, reporter)
    except Exception as error:
        if not as_json or os.environ.get("COREMILL_DEBUG", "0") not in ("", "0"):
            raise
        message, code = describe(error)
        reporter.tell("error", [], exit_code=code, text=message)
        return code
    except KeyboardInterrupt:
        if not as_json:
            raise
        reporter.tell("error", [], exit_code=EXIT_INTERRUPTED, text="interrupted")
        return EXIT_INTERRUPTED
    finally:
        reporter.close()


def _run(input: str, settings: Settings, reporter: PlainReporter) -> int:
    from coremill.config.engine import EngineConfig
    from coremill.config.errors import ConfigError
    from coremill.config.request import SamplingParams
    from coremill.coordinator.batch.cpu import cpu_lines
    from coremill.coordinator.batch.job import BatchOptions, run_batch, write_stats
    from coremill.coordinator.batch.report import worker_table
    from coremill.coordinator.batch.summary import exit_code, summary_lines
    from coremill.coordinator.batch.writer import default_errors_path

    if settings["system"] is not None and settings.given("chat") and not settings["chat"]:
        against = settings.source("chat").replace("--chat", "--no-chat")
        raise ConfigError(
            f"{settings.source('system')} and {against} contradict each other: only a chat has a system message"
        )
    options = BatchOptions(
        input=input,
        output=settings.require("output"),
        model=settings.require("model"),
        engine=EngineConfig.from_settings(settings),
        defaults=SamplingParams(**settings.of_group("sampling")),
        chat_given=settings.given("chat"),
        **{name: settings[name] for name in _BATCH_OPTIONS},
    )
    try:
        end = run_batch(options, reporter, _process_clock())
    finally:
        reporter.close()
    outcome, workers = end.outcome, end.stats["workers"]
    errors = options.errors or default_errors_path(options.output)
    if settings["show"]:
        try:
            _show_results(outcome.first, (options.output, errors))
        except BrokenPipeError:  # whoever read them has seen enough
            pass
        except OSError as error:  # the run is done and has its own exit code
            reporter.say(f"the first rows cannot be shown: {error.filename}: {error.strerror}")
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else 120
    table = worker_table(workers, outcome.progress.seconds, width) if workers else []
    num_computed = sum(worker["prefill_tokens"] + worker["decode_tokens"] for worker in workers)
    lines = summary_lines(outcome, options.output, errors, end.stats["startup_seconds"], num_computed)
    lines += [f"warning: the model was not left alone during the run: {change}" for change in end.source_changes]
    reporter.summary(table, lines, end.stats, exit_code(outcome))
    if settings["profile"]:
        operations = _profile(end.profiles)
        spent = end.stats.get("cpu_seconds")
        lines = _profile_lines(operations) + (cpu_lines(spent) if spent else [])
        reporter.tell("profile", lines, operations=operations, cpu_seconds=spent)
    if options.stats is not None:
        write_stats(options.stats, end.stats)
    return exit_code(outcome)


_BATCH_OPTIONS = (
    "errors", "format", "retry_errors", "in_order", "strict", "stats", "any_model", "chat", "system", "chat_template",
    "keep_changed", "show",
)  # fmt: skip
_STYLES = {
    "head": {"dim": True},
    "id": {"fg": "cyan"},
    "length": {"fg": "yellow"},
    "failed": {"fg": "red"},
    "end": {"fg": "green"},
    "answer": {"bold": True},
}


def _show_results(first: Sequence[FirstRow], paths: tuple[str, str]) -> None:
    """On standard output; click takes the colours away when that is no terminal."""
    from coremill.coordinator.batch.results import find_rows
    from coremill.coordinator.batch.shownrows import result_lines

    found = find_rows(paths, [row.key for row in first])
    width = shutil.get_terminal_size().columns
    for line in result_lines(first, found, width, lambda kind, text: click.style(text, **_STYLES[kind])):
        click.echo(line)
    click.echo()
    sys.stdout.flush()


def _process_clock() -> Callable[[], float]:
    """Seconds since this process was started, Python's own start included."""
    from coremill.config.cputimes import stat_fields

    started = int(stat_fields("self")[22 - 3]) / os.sysconf("SC_CLK_TCK")  # from the boot
    return lambda: time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _profile(profiles: list[list[tuple[str, str, int, float]]]) -> list[dict[str, Any]]:
    """Operations of all workers and layers together ("7.attention" is layer 7's), in the order of a step."""
    totals: dict[tuple[str, str], list[float]] = {}
    for profile in profiles:
        for label, kind, calls, seconds in profile:
            layer, _, name = label.partition(".")
            entry = totals.setdefault((name if layer.isdecimal() else label, kind), [0, 0.0])
            entry[0] += calls
            entry[1] += seconds
    return [
        {"operation": label, "kind": kind, "calls": calls, "seconds": seconds}
        for (label, kind), (calls, seconds) in totals.items()
    ]


def _profile_lines(operations: list[dict[str, Any]]) -> list[str]:
    whole = sum(entry["seconds"] for entry in operations) or 1.0
    return [
        f"{'operation':20} {'kind':12} {'calls':>10} {'seconds':>9} {'share':>6}",
        *(
            f"{entry['operation']:20} {entry['kind']:12} {entry['calls']:10,.0f} {entry['seconds']:9.3f} "
            f"{entry['seconds'] / whole:6.1%}"
            for entry in operations
        ),
    ]
