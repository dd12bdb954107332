"""The table as an SVG picture."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

from coremill.config.errors import RunError
from coremill.config.outputs import check_replaceable
from coremill.coordinator.view.table import Line

_START = b"<svg "
# A picture that is looked at offline fetches no fonts.
_WEB_FONTS = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
# Some viewers drop blanks at the beginning of a text, so texts begin after them.
_INDENTED = re.compile(r'x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)"([^>]*)>((?:&#160;)+)')
_CHARACTER_WIDTH = 12.2


def check_picture(path: str) -> None:
    """ConfigError unless a picture may be written there."""
    check_replaceable("--svg", path, _START, "a picture")


def write_picture(path: str, lines: Sequence[Line], width: int) -> None:
    """RunError when the file cannot be written."""
    try:
        Path(path).write_text(picture(lines, width))
    except OSError as error:
        raise RunError(f"cannot write --svg {path}: {error.strerror}") from None


def picture(lines: Sequence[Line], width: int) -> str:
    """SVG of a terminal `width` columns wide that shows the lines."""
    from rich.console import Console
    from rich.text import Text

    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="standard", highlight=False,
        markup=False, emoji=False, legacy_windows=False,
    )  # fmt: skip
    for line in lines:
        console.print(Text.assemble(*line), no_wrap=True)
    svg = console.export_svg(title="coremill top", unique_id="top")
    svg = _WEB_FONTS.sub("", svg).replace("Fira Code, monospace", "monospace")
    return _INDENTED.sub(_begin_later, svg)


def _begin_later(found: re.Match[str]) -> str:
    x, y, length, rest, blanks = found.groups()
    width = _CHARACTER_WIDTH * (len(blanks) // len("&#160;"))
    return f'x="{float(x) + width:g}" y="{y}" textLength="{float(length) - width:g}"{rest}>'
