"""Rows of a run for people: what was asked, what came of it.

Texts that come from models or inputs pass through `printable` here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coremill.config.printable import printable, shortened
from coremill.coordinator.batch.feeder import FirstRow

_END_WIDTH = len("length")
_MAX_ANSWER_LINES = 4

Style = Callable[[str, str], str]


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
