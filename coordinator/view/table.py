"""The workers of a view (coordinator/view/rates.py) as lines of text that fit a terminal.

A line is a list of (text, style) pieces, styles being words that `rich` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coremill.config.hostfiles import format_cpu_list

Line = list[tuple[str, str]]
Worker = Mapping[str, Any]

_GAP = 2
_HEAD, _TOTAL = "dim", "bold"
_STATE_STYLES = {"running": "green", "starting": "yellow", "leaving": "yellow", "paused": "yellow", "retired": "red"}
_MUCH_STEAL = 0.02


def plain(line: Line) -> str:
    return "".join(text for text, _ in line).rstrip()


# ---- cells ----


def count(value: float | None) -> str:
    """1234 -> "1,234"; from ten millions on in millions."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value < 1e7 else f"{value / 1e6:,.0f}M"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def megabytes(value: float | None) -> str:
    """Powers of 1024: 3 << 20 -> "3M"; from 10000M on in G."""
    if value is None:
        return "-"
    return f"{value / (1 << 20):.0f}M" if value < 10000 << 20 else f"{value / (1 << 30):.0f}G"


def gigabytes(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


@dataclass(frozen=True, slots=True)
class Column:
    """importance: 1 stays longest when a terminal is narrow. value: what it is sorted by; cell: what is shown."""

    name: str
    importance: int
    value: Callable[[Worker], Any]
    cell: Callable[[Worker], str]
    style: Callable[[Worker], str] = lambda worker: ""


def _of(name: str, show: Callable[[Any], str]) -> dict[str, Callable[[Worker], Any]]:
    return {"value": lambda worker: worker[name], "cell": lambda worker: show(worker[name])}


def _cores(worker: Worker) -> str:
    text = format_cpu_list(tuple(worker["cores"]))
    return text if len(text) <= 9 else f"{len(worker['cores'])} cores"


def _of_ceiling(worker: Worker) -> float | None:
    most = worker["ceiling_gb_per_s"]
    return worker["gb_per_s"] / most if most and worker["gb_per_s"] is not None else None


def _steal_style(worker: Worker) -> str:
    return "yellow" if (worker["steal"] or 0) > _MUCH_STEAL else ""


COLUMNS: tuple[Column, ...] = (
    Column("#", 1, **_of("worker", str)),
    Column("cores", 10, lambda w: w.get("cores") or [], lambda w: _cores(w) if "cores" in w else ""),
    Column("MHz", 12, **_of("mhz", count)),
    Column("steal", 11, **_of("steal", percent), style=_steal_style),
    Column("state", 2, **_of("state", str), style=lambda w: _STATE_STYLES.get(w["state"], "")),
    Column("active", 3, lambda w: w["active"], lambda w: f"{w['active']}/{w['max_active']}"),
    Column("fill", 7, **_of("batch_fill", percent)),
    Column("prompt/s", 5, **_of("prefill_tokens_per_s", count)),
    Column("new/s", 4, **_of("decode_tokens_per_s", count)),
    Column("busy", 6, **_of("busy", percent)),
    Column("GB/s", 8, **_of("gb_per_s", gigabytes)),
    Column("of max", 15, _of_ceiling, lambda w: percent(_of_ceiling(w))),
    Column("PSS", 9, **_of("pss_bytes", megabytes)),
    Column("weights", 19, **_of("pss_weights_bytes", megabytes)),
    Column("arena", 18, **_of("pss_arena_bytes", megabytes)),
    Column("own", 17, **_of("pss_private_bytes", megabytes)),
    Column("blocks", 16, **_of("arena_blocks", count)),
    Column("hits", 13, **_of("prefix_hits", percent)),
    Column("restarts", 14, **_of("restarts", count), style=lambda w: "red" if w["restarts"] else ""),
)
SORT_NAMES = tuple(column.name for column in COLUMNS)
# Restarts say that something is wrong: then they come before all that is only interesting.
_URGENT = {"restarts": 3}
# Left out where this machine does not say.
_OFTEN_UNKNOWN = ("MHz", "of max")


def worker_lines(
    view: Mapping[str, Any],
    width: int,
    *,
    sort: str = "#",
    descending: bool = False,
    first: int = 0,
    most: int = 1 << 20,
) -> list[Line]:
    """A heading, a line for each worker, and one of sums when there are several.

    sort: the column they are ordered by. first, most: which of them, in that order; the line of sums is of all.
    Columns that do not fit into `width` are left out, the least important first.
    """
    workers, sums = view["workers"], {**view["totals"], "worker": "all", "state": ""}
    column = next(column for column in COLUMNS if column.name == sort)
    known = [worker for worker in workers if column.value(worker) is not None]
    unknown = [worker for worker in workers if column.value(worker) is None]
    ordered = [*sorted(known, key=column.value, reverse=descending), *unknown]
    mark = "" if sort == "#" and not descending else "↓" if descending else "↑"
    rows = [*ordered, sums] if len(workers) > 1 else ordered
    table = [_Cells(c, c.name + (mark if c is column else ""), [c.cell(row) for row in rows]) for c in COLUMNS]
    table = [cells for cells in table if cells.known or cells.column.name not in _OFTEN_UNKNOWN]
    chosen = _fitting(table, width, {"restarts"} if sums["restarts"] else set())
    lines: list[Line] = [[((" " * _GAP).join(cells.head.rjust(cells.width) for cells in chosen), _HEAD)]]
    lines += [_row_line(chosen, index, ordered[index], "") for index in range(len(ordered))[first : first + most]]
    if len(workers) > 1:
        lines.append(_row_line(chosen, len(ordered), sums, _TOTAL))
    return [cut_line(line, width) for line in lines]


class _Cells:
    """One column of text."""

    def __init__(self, column: Column, head: str, cells: Sequence[str]) -> None:
        self.column, self.head, self.cells = column, head, cells
        self.known = any(cell != "-" for cell in cells)
        self.width = max(len(head), *map(len, cells)) if cells else len(head)


def _fitting(table: Sequence[_Cells], width: int, urgent: set[str]) -> list[_Cells]:
    def importance(cells: _Cells) -> int:
        name = cells.column.name
        return _URGENT[name] if name in urgent else cells.column.importance

    chosen: list[_Cells] = []
    left = width + _GAP
    for cells in sorted(table, key=importance):
        if cells.width + _GAP > left:
            break
        chosen.append(cells)
        left -= cells.width + _GAP
    return [cells for cells in table if cells in chosen]


def _row_line(chosen: Sequence[_Cells], index: int, worker: Worker, style: str) -> Line:
    line: Line = []
    for at, cells in enumerate(chosen):
        text = cells.cells[index].rjust(cells.width)
        line.append((" " * _GAP * (at > 0) + text, style or cells.column.style(worker)))
    return line


def cut_line(line: Line, width: int) -> Line:
    """At most `width` columns of the terminal; a cut one ends in an ellipsis."""
    from rich.cells import cell_len

    if sum(cell_len(text) for text, _ in line) <= width:
        return line
    cut: Line = []
    left = width - 1
    for text, style in line:
        piece = _cut_cells(text, left)
        cut.append((piece, style))
        left -= cell_len(piece)
        if piece != text:
            break
    return [*cut, ("…", "")]


def _cut_cells(text: str, width: int) -> str:
    """The beginning of the text that takes at most `width` columns."""
    from rich.cells import cell_len

    while cell_len(text) > width:
        text = text[: max(0, len(text) - max(1, (cell_len(text) - width) // 2))]
    return text
