"""How an input stands to the rows that earlier runs finished, before anything is started.

Read through once, as the run will read it; only when OUT has rows, and only files, which can be read twice. It ends
early when it has met rows of both kinds among so many lines: a long resume then starts without reading all of it, and
what has changed further on is reported at the end of the run.
"""

from __future__ import annotations

from coremill.config.errors import ResumeRefusedError, RunError
from coremill.config.printable import shortened
from coremill.coordinator.batch.feeder import Intake, Rules
from coremill.coordinator.batch.plan import count_of
from coremill.coordinator.batch.reader import LineReader
from coremill.coordinator.batch.rowtable import IN_ERRORS, IN_RESULTS, SEEN, RowTable
from coremill.coordinator.batch.runner import Outcome, Progress
from coremill.coordinator.batch.slowly import Slowly, Stage
from coremill.coordinator.batch.source import open_source

MAX_LINES = 20_000


def check_input(
    path: str,
    format: str,
    out: str,
    table: RowTable,
    rules: Rules,
    *,
    retry: bool,
    keep_changed: bool,
    keep: int,
    tell: Stage | None = None,
) -> Outcome | None:
    """Refuses an input that OUT is not about. The outcome of the run when no row has to run, else None.

    Args:
        table: rows of OUT and of the error file with the digests of their lines.
        retry: failed rows run again, so that they are not finished and may have been corrected.
        keep_changed: rows that have changed keep their results.
        tell: told of progress when it takes long.

    Raises:
        ResumeRefusedError: rows have changed since they were finished, or none of the finished rows is here.
        RunError: the input breaks off, and all rows before that are finished.
    """
    finished = IN_RESULTS if retry else IN_RESULTS | IN_ERRORS
    num_finished = table.count(IN_RESULTS) + (0 if retry else table.count(IN_ERRORS))
    intake = Intake(table, rules, format == "text", finished=finished, keep=keep)
    source, broken = open_source(path), None
    slowly = Slowly("comparing the input with the results so far", tell)
    try:
        for line in LineReader(source, format):  # type: ignore[arg-type]
            intake.admit(line, 0)
            slowly(source.position(), source.size or 0)
            if intake.num_read >= MAX_LINES and intake.num_admitted and intake.num_skipped:
                break
    except RunError as error:  # rows in front of it may have to run
        broken = error
    finally:
        source.close()
        table.clear_flag(SEEN)
    if intake.num_changed and not keep_changed:
        raise ResumeRefusedError(_changed_text(intake, path, out))
    if broken is not None and not intake.num_admitted:
        raise broken
    if num_finished and not intake.num_skipped:
        raise ResumeRefusedError(
            f"{out} has {count_of(num_finished, 'finished row')}, of which {path} has none: choose another -o for it"
        )
    return None if intake.num_admitted else _idle_outcome(intake, table)


def _idle_outcome(intake: Intake, table: RowTable) -> Outcome:
    num_rows = intake.num_read
    num_results, num_errors = table.count(IN_RESULTS), table.count(IN_ERRORS)
    return Outcome(
        Progress(num_read=num_rows, num_skipped=num_rows, num_rows=num_rows, input_ended=True),
        results_before=num_results,
        errors_before=num_errors,
        num_gone=num_results + num_errors - num_rows,
        num_changed=intake.num_changed,
        num_unrecorded=intake.num_unrecorded,
        changed=intake.changed,
        first=intake.first,
        idle=True,
    )


def _changed_text(intake: Intake, path: str, out: str) -> str:
    rows = ", ".join(f"line {number} ('{shortened(name, 40)}')" for number, name in intake.changed[:5])
    more = ", ..." if intake.num_changed > 5 else ""
    return (
        f"{count_of(intake.num_changed, 'row')} of {path} changed after {out} got the outcome: {rows}{more}. Rows are "
        f"known by their custom_id, or else by their line number, which lines added before them change. Remove a row's "
        f"line from {out} to run it anew; or use another -o to start anew, --retry-errors to run corrected rows that "
        "failed, --keep-changed to keep the old outcomes"
    )
