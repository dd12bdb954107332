"""The end of a run: its exit code, the summary for people, the object for scripts. The same numbers in all three."""

from __future__ import annotations

import signal
from typing import Any

from coremill.config.printable import shortened
from coremill.coordinator.batch.plan import count_of, format_seconds, stats_plan
from coremill.coordinator.batch.runner import Outcome

EXIT_OK, EXIT_ROWS_FAILED, EXIT_ROWS_CHANGED, EXIT_STRICT = 0, 3, 5, 6


def exit_code(outcome: Outcome) -> int:
    """128 + signal when one stopped the run; else the gravest of what happened."""
    if isinstance(outcome.stopped, signal.Signals):
        return 128 + outcome.stopped
    if outcome.stopped == "strict":
        return EXIT_STRICT
    if outcome.errors_before + outcome.progress.num_errors:
        return EXIT_ROWS_FAILED
    return EXIT_ROWS_CHANGED if outcome.num_changed or _is_another_input(outcome) else EXIT_OK


def _is_another_input(outcome: Outcome) -> bool:
    """The files hold rows, and none of them is in the input. Only pipes get this far; files are refused."""
    return 0 < outcome.results_before + outcome.errors_before == outcome.num_gone


def summary_lines(outcome: Outcome, out: str, errors: str, startup_seconds: float, num_computed: int = 0) -> list[str]:
    """Rows read = rows finished before + results + failures of this run + rows not finished.

    num_computed: tokens that workers have computed, for rows that are finished or not.
    """
    if outcome.idle:
        return _idle_lines(outcome, out, errors)
    progress = outcome.progress
    unfinished = progress.num_read - progress.num_skipped - progress.num_results - progress.num_errors
    parts = [f"{progress.num_results:,} results", f"{progress.num_errors:,} failed"]
    if progress.num_skipped:
        parts.insert(0, f"{progress.num_skipped:,} finished by earlier runs")
    if unfinished:
        parts.append(f"{unfinished:,} not finished")
    lines = []
    if outcome.stopped == "strict":
        lines.append("stopped at the first failed row (--strict); the same command goes on once the row is corrected")
    elif outcome.stopped is not None:
        lines.append(f"stopped by {outcome.stopped.name}; the same command goes on from here")
    elif not progress.num_results and progress.num_errors:
        lines.append("all rows of this run failed")
    rest = "" if progress.input_ended else " (not all of the input was read)"
    lines.append(f"rows: {progress.num_read:,} read{rest} = {' + '.join(parts)}")
    lines += _failure_lines(outcome)
    seconds = max(progress.seconds, 1e-9)
    total = progress.prompt_tokens + progress.completion_tokens
    lines.append(
        f"tokens: {progress.prompt_tokens:,} prompt ({progress.cached_tokens:,} cached) + "
        f"{progress.completion_tokens:,} completion = {total:,}"
    )
    discarded = num_computed - (total - progress.cached_tokens)
    if outcome.stopped is not None and unfinished and discarded > 0:
        lines[-1] += f"; {discarded:,} more of unfinished rows were discarded"
    elif total:
        lines[-1] += f"; {total / seconds:,.0f} tokens/s"
    # Rows that never ran have no part in how fast rows run.
    rate = f"; {rows_rate(progress.num_results, seconds)}" if progress.num_results else ""
    lines.append(f"time: {format_seconds(progress.seconds)} after {format_seconds(startup_seconds)} to start{rate}")
    return lines + _file_lines(outcome, out, errors) + _warnings(outcome, out)


def rows_rate(num_rows: int, seconds: float) -> str:
    """In the largest unit of time that tells slow runs apart."""
    for unit, length in (("s", 1), ("min", 60), ("h", 3600)):
        if num_rows * length / seconds >= 1 or unit == "h":
            break
    return f"{num_rows * length / seconds:,.1f} rows/{unit}"


def _idle_lines(outcome: Outcome, out: str, errors: str) -> list[str]:
    rows = count_of(outcome.progress.num_read, "row")
    lines = [f"nothing to do: all {rows} of the input are finished"]
    return lines + _file_lines(outcome, out, errors) + _warnings(outcome, out)


def _failure_lines(outcome: Outcome) -> list[str]:
    """How many rows failed of what, and the first of them in their own words."""
    if not outcome.error_codes:
        return []
    lines = ["failed: " + ", ".join(f"{count:,} {code}" for code, count in sorted(outcome.error_codes.items()))]
    for failure in outcome.failures:
        lines.append(
            f"  line {failure.line} ('{shortened(failure.custom_id, 40)}'): {shortened(failure.error.message, 300)}"
        )
    if (more := sum(outcome.error_codes.values()) - len(outcome.failures)) > 0:
        lines.append(f"  and {more:,} more")
    return lines


def _file_lines(outcome: Outcome, out: str, errors: str) -> list[str]:
    progress = outcome.progress
    lines = [f"{out} has {count_of(outcome.results_before + progress.num_results, 'result')}"]
    if num_errors := outcome.errors_before + progress.num_errors:
        again = "--retry-errors runs them again"
        if outcome.stopped == "strict":  # whose next run does so anyway
            again = "the same command runs it again" if num_errors == 1 else "the same command runs them again"
        lines.append(f"{errors} has {count_of(num_errors, 'failed row')} ({again})")
    return lines


def _warnings(outcome: Outcome, out: str) -> list[str]:
    lines = []
    if outcome.num_changed:
        shown = ", ".join(f"line {number} ('{shortened(name, 40)}')" for number, name in outcome.changed)
        more = ", ..." if outcome.num_changed > len(outcome.changed) else ""
        lines.append(
            f"warning: {count_of(outcome.num_changed, 'row')} of the input changed after being finished; earlier "
            f"outcomes are kept: {shown}{more}. Failed ones run again with --retry-errors, others once their lines are "
            f"removed from {out}"
        )
    if outcome.num_gone:
        rows = count_of(outcome.num_gone, "row")
        lines.append(f"warning: {rows} finished by earlier runs not in the input any more")
    if outcome.num_dropped_errors:
        rows = count_of(outcome.num_dropped_errors, "row")
        lines.append(
            f"warning: {rows} that failed in earlier runs not in the input any more, and gone from the error file"
        )
    if outcome.num_unrecorded:
        lines.append(
            f"warning: of {outcome.num_unrecorded:,} finished rows the journal has lost the record (a power cut?); "
            "whether their input has changed since cannot be told"
        )
    return lines


def stats_object(outcome: Outcome, engine_stats: dict[str, Any], startup_seconds: float) -> dict[str, Any]:
    """What --stats writes: names that scripts rely on."""
    progress = outcome.progress
    return {
        "rows": progress.num_read,
        "errors": outcome.errors_before + progress.num_errors,
        "results": outcome.results_before + progress.num_results,
        "skipped_rows": progress.num_skipped,
        "new_results": progress.num_results,
        "new_errors": progress.num_errors,
        "changed_rows": outcome.num_changed,
        "error_codes": outcome.error_codes,
        "seconds": progress.seconds,
        "startup_seconds": startup_seconds,
        "prompt_tokens": progress.prompt_tokens,
        "cached_tokens": progress.cached_tokens,
        "completion_tokens": progress.completion_tokens,
        "exit_code": exit_code(outcome),
        "stopped": outcome.stopped.name if isinstance(outcome.stopped, signal.Signals) else outcome.stopped,
        "plan": stats_plan(outcome.plan),
        **{name: value for name, value in engine_stats.items() if name != "startup_seconds"},
    }
