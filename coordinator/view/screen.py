"""What stands around the table of workers in a view: whose it is, the queue, the sums, the rows that run.

Texts of models and inputs pass through `printable` here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coremill.config.printable import shortened
from coremill.coordinator.batch.plan import count_of, format_seconds
from coremill.coordinator.view.table import Line, count, cut_line, gigabytes, megabytes, percent, worker_lines

View = Mapping[str, Any]

_BETWEEN = "   "
_MOST_NAME = 40
# Between the columns of the table of rows, and the narrowest one for ids.
_GAP = "  "
_MIN_ID = 8


def whole_lines(
    view: View, width: int, height: int | None = None, *, most_rows: int = 1 << 20, **order: Any
) -> list[Line]:
    """Everything, for a page of `width` columns; height: lines there are for it, None: as many as it takes.

    order: sort, descending and first of worker_lines. Workers take the lines they need; rows get what is left.
    """
    lines = [title_line(view, width), queue_line(view, width), sums_line(view, width), []]
    if height is None:
        rows = row_lines(view, width, most_rows)
        return [*lines, *worker_lines(view, width, **order), *([[], *rows] if rows else [])]
    room = max(1, height - len(lines))
    num_workers = len(view["workers"])
    extra = 1 + (num_workers > 1)  # the heading, the sums
    most = max(1, min(num_workers, room - extra))
    lines += worker_lines(view, width, most=most, **order)
    left = height - len(lines) - 2  # an empty line, the heading
    return [*lines, [], *row_lines(view, width, min(left, most_rows))] if left > 0 else lines[:height]


def title_line(view: View, width: int) -> Line:
    """What runs here."""
    name = shortened(str(view.get("model") or "?"), _MOST_NAME)
    facts = [Fact(f"coremill {view.get('kind', '')}".rstrip(), "bold"), Fact(name, "cyan")]
    if view["paused"]:
        facts.append(Fact("PAUSED", "bold yellow"))
    if view.get("input"):
        facts.append(Fact(f"{_file(view['input'])} > {_file(view['output'])}"))
    if view.get("pid"):
        facts.append(Fact(f"pid {view['pid']}", "dim"))
    if view.get("seconds") is not None:
        facts.append(Fact(format_seconds(view["seconds"]), "dim"))
    return fact_line(facts, width)


def _file(path: str) -> str:
    return "standard input" if path == "-" else shortened(path.rpartition("/")[2], _MOST_NAME)


def queue_line(view: View, width: int) -> Line:
    """Where the rows are."""
    queue = view["queue"]
    done, rows = queue["skipped"] + queue["done"] + queue["errors"], queue["rows"]
    facts = [Fact(f"{count_of(done, 'row')} done")]
    if rows is not None:
        about = "about " if queue["rows_are_estimated"] else ""
        facts = [Fact(f"{done:,} of {about}{rows:,} rows ({percent(done / rows if rows else 1.0)})")]
    facts.append(Fact(f"{queue['waiting']:,} waiting", importance=5))
    facts.append(Fact(f"{queue['running']:,} running", importance=4))
    facts.append(Fact(f"{queue['errors']:,} failed", "red" if queue["errors"] else "", importance=2))
    if queue["rows_per_s"] is not None:
        rate = queue["rows_per_s"]
        facts.append(Fact(f"{rate:,.1f} rows/s" if rate < 100 else f"{rate:,.0f} rows/s", importance=3))
    if queue["seconds_left"] is not None and not view["paused"]:
        facts.append(Fact(f"about {format_seconds(queue['seconds_left'])} left", "bold"))
    return fact_line(facts, width)


def sums_line(view: View, width: int) -> Line:
    """What all workers do together, and how full the arena is."""
    sums, arena = view["totals"], view["arena"]
    most = sums["ceiling_gb_per_s"]
    ceiling = f"of {most:.1f} GB/s" if most else "GB/s (ceiling unmeasured)"
    cached = f", {arena['cached']:,} cached" if arena["cached"] else ""
    facts = [
        Fact(f"tokens/s {count(sums['prefill_tokens_per_s'])} prompt + {count(sums['decode_tokens_per_s'])} new"),
        Fact(f"{gigabytes(sums['gb_per_s'])} {ceiling}", importance=3),
        Fact(f"arena {arena['used']:,} of {arena['blocks']:,} blocks{cached}", importance=4),
        Fact(f"prefix hits {percent(sums['prefix_hits'])}", importance=2),
        Fact(f"PSS {megabytes(sums['pss_bytes'])}", importance=2),
    ]
    return fact_line(facts, width)


@dataclass(frozen=True, slots=True)
class Fact:
    """importance: those of the largest number go first when a line is too short."""

    text: str
    style: str = ""
    importance: int = 1


def fact_line(facts: Sequence[Fact], width: int) -> Line:
    """The facts side by side, without those for which there is no room."""
    from rich.cells import cell_len

    kept = list(facts)
    while len(kept) > 1 and sum(cell_len(fact.text) + len(_BETWEEN) for fact in kept) > width + len(_BETWEEN):
        # Of equals the last one.
        kept.remove(max(reversed(kept), key=lambda fact: fact.importance))
    line: Line = []
    for fact in kept:
        line += [(_BETWEEN, "")] if line else []
        line.append((fact.text, fact.style))
    return cut_line(line, width)


# ---- rows ----

_ROW_HEADS = ("worker", "phase", "prompt", "new", "of")


def row_lines(view: View, width: int, most: int = 1 << 20) -> list[Line]:
    """A heading and at most so many lines of rows that run, each worker's in turn, so that few lines show some of
    each. The last line says how many there is no room for."""
    from rich.cells import cell_len, set_cell_size

    rows = list(_row_cells(view))
    num_running = max(len(rows), view["queue"]["running"])
    if num_running > most or num_running > len(rows):
        rows = rows[: max(0, most - 1)]
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(_ROW_HEADS, *(rest for _, rest in rows), strict=True)]
    room = max(_MIN_ID, width - sum(widths) - len(_GAP) * len(widths))
    column = min(room, max(3, *(cell_len(shortened(name, room)) for name, _ in rows)))

    def line(name: str, rest: Sequence[str]) -> str:
        cells = (cell.rjust(size) for cell, size in zip(rest, widths, strict=True))
        return _GAP.join([set_cell_size(name, column), *cells])

    lines: list[Line] = [[(line("row", _ROW_HEADS), "dim")]]
    for name, rest in rows:
        cut = shortened(name, column)
        while cell_len(cut) > column:  # wide characters
            cut = cut[:-2] + "…"
        lines.append([(line(cut, rest), "")])
    if num_running > len(rows):
        lines.append([(f"… {num_running - len(rows):,} more", "dim")])
    return [cut_line(each, width) for each in lines]


def _row_cells(view: View) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(id, the other cells)."""
    longest = max((len(worker["rows"]) for worker in view["workers"]), default=0)
    for index in range(longest):
        for worker in view["workers"]:
            if index < len(worker["rows"]):
                row = worker["rows"][index]
                numbers = (f"{row[name]:,}" for name in ("prompt_tokens", "new_tokens", "max_tokens"))
                yield row["id"], (str(worker["worker"]), row["phase"], *numbers)
