"""`coremill bench draw`: pictures of what `bench --json` and `bench workers --json` have found, as one SVG file.

A panel for throughput over the batch, one over the context, one over workers, as far as the files hold them. Plain
lines on a white ground, readable without colours: every line is named at its end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from coremill.config.errors import ConfigError
from coremill.config.outputs import check_replaceable

_WIDTH, _HEIGHT = 460, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 118, 54, 48
_COLOURS = ("#1f6f8b", "#c8553d", "#5b8c2a", "#7a4ea3", "#b8860b", "#444444")
_FONT = 'font-family="sans-serif" font-size="12"'


@dataclass(slots=True)
class Line:
    """name: said at its end. points: (x, y), ascending in x."""

    name: str
    points: list[tuple[float, float]] = field(default_factory=list)
    dashed: bool = False


@dataclass(slots=True)
class Panel:
    """title: what over what; model: whose."""

    title: str
    model: str
    x_name: str
    lines: list[Line]


def draw_files(paths: Sequence[Path], out: Path) -> list[str]:
    """Writes the SVG; titles of its panels. ConfigError for files that hold nothing to draw, and for an `out` that is
    something else than a picture."""
    check_replaceable("--output", str(out), b"<svg ", "an SVG file")
    panels = [panel for path in paths for panel in panels_of(_read(path))]
    if not panels:
        raise ConfigError(f"{paths[0]}: too few sizes in it to draw a line through")
    out.write_text(svg(panels), encoding="utf-8")
    return [panel.title for panel in panels]


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text())
        if report.get("one_worker") or report.get("workers"):
            return report
    except (ValueError, AttributeError):
        pass
    raise ConfigError(f"{path}: not what `coremill bench --json` or `coremill bench workers --json` prints")


# ---- what is drawn ----


def panels_of(report: dict[str, Any]) -> list[Panel]:
    """Panels in which at least one line has two points."""
    made = _over_workers(report) if "workers" in report else [_over_batch(report), _over_context(report)]
    for panel in made:
        panel.lines = [line for line in panel.lines if len(line.points) > 1]
    return [panel for panel in made if panel.lines]


def _decodes(report: dict[str, Any], who: str) -> list[dict[str, Any]]:
    return sorted(
        (row for row in report[who] if row["what"] == "decode"), key=lambda row: (row["context"], row["sequences"])
    )


def _who(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(key of the rows, words for whose they are)."""
    num_workers = report["all_workers"][0]["workers"]
    return [("one_worker", "1 worker")] + ([("all_workers", f"{num_workers} workers")] if num_workers > 1 else [])


def _over_batch(report: dict[str, Any]) -> Panel:
    lines: dict[str, Line] = {}
    for who, words in _who(report):
        for row in _decodes(report, who):
            name = f"{words}, at {row['context']}"
            line = lines.setdefault(name, Line(name, dashed=who == "one_worker"))
            line.points.append((row["sequences"], row["tokens_per_s"]))
    return Panel("tokens/s over batch", report["model"]["name"], "sequences of each worker", list(lines.values()))


def _over_context(report: dict[str, Any]) -> Panel:
    """Of the batch that was measured at most contexts."""
    lines = []
    for who, words in _who(report):
        rows = _decodes(report, who)
        counts = [row["sequences"] for row in rows]
        if counts:
            batch = max(sorted(set(counts)), key=counts.count)
            points = [(row["context"], row["tokens_per_s"]) for row in rows if row["sequences"] == batch]
            lines.append(Line(f"{words} x {batch}", points, dashed=who == "one_worker"))
    return Panel("tokens/s over context", report["model"]["name"], "context, tokens", lines)


def _over_workers(report: dict[str, Any]) -> list[Panel]:
    panels = []
    for what in ("decode", "prefill"):
        rows = [row for row in report["workers"] if row["what"] == what]
        if rows:
            alone, size = rows[0]["tokens_per_s"], rows[0]["context"]
            measured = Line("measured", [(row["workers"], row["tokens_per_s"]) for row in rows])
            ideal = Line("1 worker's, times", [(row["workers"], row["workers"] * alone) for row in rows], dashed=True)
            case = f"decode of {rows[0]['sequences']} x {size}" if what == "decode" else f"prefill of {size}"
            panels.append(
                Panel(f"{case}: tokens/s over workers", report["model"]["name"], "workers", [ideal, measured])
            )
    return panels


# ---- how ----


def svg(panels: Sequence[Panel]) -> str:
    width = _WIDTH * len(panels)
    body = "".join(
        f'<g transform="translate({_WIDTH * index},0)">\n{_panel(panel)}</g>\n' for index, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" viewBox="0 0 {width} {_HEIGHT}">\n'
        f'<rect width="{width}" height="{_HEIGHT}" fill="white"/>\n{body}</svg>\n'
    )


def _panel(panel: Panel) -> str:
    xs = sorted({x for line in panel.lines for x, _ in line.points})
    top = nice_top(max(y for line in panel.lines for _, y in line.points))
    # Sizes double, so their logarithms are evenly spread.
    low, high = math.log2(xs[0]), math.log2(xs[-1])

    def at_x(x: float) -> float:
        return _LEFT + (math.log2(x) - low) / ((high - low) or 1.0) * (_WIDTH - _LEFT - _RIGHT)

    def at_y(y: float) -> float:
        return _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM)

    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [
        _text(_LEFT, 20, panel.title, "start", bold=True),
        _text(_LEFT, 37, panel.model, "start", "#666666"),
        _text((_LEFT + right) / 2, _HEIGHT - 10, panel.x_name),
    ]
    for step in range(5):
        value = top * step / 4
        y = at_y(value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#dddddd"/>\n')
        parts.append(_text(_LEFT - 6, y + 4, f"{value:,.10g}", "end"))
    for x in xs:
        parts.append(f'<path d="M{at_x(x):.1f} {bottom}v5" stroke="#444444"/>\n')
        parts.append(_text(at_x(x), bottom + 18, f"{x:g}"))
    places = spread([at_y(line.points[-1][1]) for line in panel.lines], 14, _TOP, bottom)
    for index, (line, place) in enumerate(zip(panel.lines, places, strict=True)):
        colour, dash = _COLOURS[index % len(_COLOURS)], ' stroke-dasharray="5 3"' if line.dashed else ""
        path = "L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in line.points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>\n')
        parts += [f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3" fill="{colour}"/>\n' for x, y in line.points]
        parts.append(_text(at_x(line.points[-1][0]) + 8, place + 4, line.name, "start", colour))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = "#222222", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} {_FONT}{weight} fill="{colour}">{escape(text)}</text>\n'


def nice_top(value: float) -> float:
    """The end of an axis: 1, 2, 4 or 8 times a power of ten, at or above the value."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next((step * power for step in (1, 2, 4, 8) if step * power >= value), 10 * power)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near those wanted, in their order, at least `gap` apart and within the limits as far as there is room."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed: list[float] = [0.0] * len(wanted)
    above = low - gap
    for index in order:
        placed[index] = above = max(wanted[index], above + gap)
    below = high + gap
    for index in reversed(order):
        placed[index] = below = min(placed[index], below - gap)
    return placed
