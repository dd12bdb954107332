"""`coremill inspect`: what a model file holds, what running it takes, and how it is packed."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import click

from coremill.config.settings import Settings
from coremill.tools.options import Verb, takes


@click.command(
    cls=Verb,
    examples=[
        ("coremill inspect model.gguf", "what it is, whether it runs, and what memory that takes"),
        ("coremill inspect smollm2 --layout", "how each tensor's shape maps from the file to panels"),
        ("coremill inspect model.gguf --layout --json", "the same, every tensor, for a script"),
    ],
)
@click.argument("model_name", metavar="[MODEL]", required=False)
@takes("inspect")
def command(settings: Settings, model_name: str | None) -> None:
    """Show what MODEL (a GGUF file, a pack or a short name) holds. Nothing is packed for it."""
    from coremill.native.cache import cache_folder, find_model
    from coremill.tools.inspect_report import examine
    from coremill.tools.model_progress import ModelProgress

    model = model_name or settings.require("model", "MODEL")
    with ModelProgress() as progress:
        path = find_model(model, cache_folder(), progress)
    report = examine(path, layout=settings["layout"])
    if settings["json"]:
        click.echo(json.dumps(report, indent=2))
    else:
        # In a pipe lines stay whole.
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1 << 16
        click.echo("\n".join(text_lines(report, width)))


def text_lines(report: dict[str, Any], width: int = 1 << 16) -> Iterator[str]:
    """The report for people, in lines of up to `width`. Texts of the model are made harmless to terminals."""
    wrap = textwrap.TextWrapper(
        max(40, width), subsequent_indent=" " * 16, break_long_words=False, break_on_hyphens=False
    )
    for label, text in _rows(report):
        yield from wrap.wrap(f"{label:<15} {text}")
    if "layout" in report:
        yield ""
        yield from layout_lines(report["layout"], width)


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from coremill.config.memory import format_size
    from coremill.config.printable import printable

    def text(value: Any) -> str:
        return printable(str(value)) if value not in (None, "") else "not given"

    yield "model", f"{text(report['name'])} ({text(report['architecture'])})"
    yield "licence", text(report["license"])
    yield "supported", "yes" if report["supported"] else f"no: {printable(report['why'])}"
    files = f" in {report['files']} files" if report.get("files", 1) > 1 else ""
    yield "file", f"{printable(report['path'])}, {format_size(report['bytes'])}{files} ({report['kind']})"
    parameters = report["parameters"]
    if parameters:
        yield "parameters", f"{parameters / 1e6:,.1f} million, {8 * report['bytes'] / parameters:.2f} bits each"
    yield "formats", ", ".join(f"{count} {printable(str(name))}" for name, count in report["formats"].items())
    tokenizer = report["tokenizer"]
    yield "tokenizer", f"{text(tokenizer['model'])}, pre {text(tokenizer['pre'])}, {tokenizer['tokens'] or 0:,} tokens"
    if report["supported"]:
        yield from _model_rows(report)


def _model_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from coremill.config.memory import format_size

    model, rope, memory = report["model"], report["model"]["rope"], report["memory"]
    yield "chat template", "yes" if report["chat_template"] else "none"
    yield "context", f"{report['context_length']:,} tokens"
    yield (
        "shape",
        f"{model['num_layers']} layers, hidden {model['hidden_size']}, ffn {model['ffn_size']}, "
        f"{model['num_heads']} heads of {model['head_dim']} on {model['num_kv_heads']} KV heads, "
        f"{'tied' if model['tied_output'] else 'separate'} output",
    )
    scaled = "" if rope["scaling"] == "none" else f", {rope['scaling']} scaling by {rope['factor']:g}"
    if rope["scaling"] == "llama3":
        scaled = ", llama3 scaling"
    yield "rope", f"{rope['pairing']} pairs, {rope['dim']} of {model['head_dim']}, theta {rope['theta']:g}{scaled}"
    settings = memory["scratch_settings"]
    yield "weights", f"{format_size(memory['weights'])} packed, in memory once for all workers"
    yield (
        "scratch",
        f"{format_size(memory['scratch_per_worker'])} for each worker (steps of {settings['step_tokens']} tokens, "
        f"{settings['max_active']} sequences)",
    )
    per_token = memory["kv_per_token"]
    yield (
        "KV cache",
        f"{format_size(per_token)} a token ({memory['kv_type']}), "
        f"{format_size(per_token * report['context_length'])} for the whole context",
    )


# ---- layout ----

_LAYER = re.compile(r"\bblk\.(\d+)\.")


def layout_lines(layout: list[dict[str, Any]], width: int = 1 << 16) -> Iterator[str]:
    """A table of tensors; where that is too wide, two lines and a panel's shape for each. Layers that are packed like
    the one before are named in one line."""
    header = ("tensor in the file", "rows x k", "format", "packed as", "rows", "panels", "a panel is")
    rows, alike = [header], 0
    groups = _by_layer(layout)
    for i, (layer, entries) in enumerate(groups):
        if i and layer is not None and _anonymous(entries) == _anonymous(groups[i - 1][1]):
            alike += 1
            continue
        if alike:
            rows.append(_alike_row(groups, i - 1, alike))
            alike = 0
        for entry in entries:
            rows += _entry_rows(entry)
    widths = [max(len(row[column]) for row in rows if len(row) > 1) for column in range(len(header))]
    lines = ["  ".join(map(str.ljust, row, widths[: len(row)])).rstrip() for row in rows]
    if max(map(len, lines)) <= width:
        yield from lines
        return
    for row in rows[1:]:
        yield from _stacked(row)


def _stacked(row: tuple[str, ...]) -> Iterator[str]:
    if len(row) == 1:
        yield row[0]
        return
    tensor, shape, kind, name, place, panels, panel = row
    yield f"{tensor}  {shape}  {kind}".rstrip()
    yield f"    {name}" + (f", {place}: {panels} panels" if panels else "")
    yield f"    {panel}"


def _by_layer(layout: list[dict[str, Any]]) -> list[tuple[str | None, list[dict[str, Any]]]]:
    """Consecutive entries of one layer together; what belongs to no layer alone."""
    groups: list[tuple[str | None, list[dict[str, Any]]]] = []
    for entry in layout:
        match = _LAYER.match(entry["name"])
        layer = match[1] if match else None
        if layer is None or not groups or groups[-1][0] != layer:
            groups.append((layer, []))
        groups[-1][1].append(entry)
    return groups


def _anonymous(entries: list[dict[str, Any]]) -> str:
    """A layer's entries without its number and places."""
    kept = [{key: value for key, value in entry.items() if key != "offset"} for entry in entries]
    return _LAYER.sub("blk.*.", json.dumps(kept))


def _alike_row(groups: list[tuple[str | None, list[dict[str, Any]]]], last: int, count: int) -> tuple[str]:
    first = groups[last - count + 1][0]
    named = f"layers {first} to {groups[last][0]}" if count > 1 else f"layer {first}"
    return (f"... {named} like layer {groups[last - count][0]}",)


def _entry_rows(entry: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    if entry["kind"] == "vector":
        for part in entry["parts"]:
            yield part["tensor"], str(part["shape"][0]), "", entry["name"], "", "", f"[{entry['length']}] f32"
        return
    for i, part in enumerate(entry["parts"]):
        rows, k = part["shape"]
        padding = f" +{part['padding_rows']}" if part["padding_rows"] else ""
        place = (
            f"from {part['first_row']}"
            if entry["fusion"] != "interleave"
            else f"panels {i}, {i + len(entry['parts'])}, ..."
        )
        name = entry["name"] if entry["fusion"] is None else f"{entry['name']} ({entry['fusion']})"
        yield part["tensor"], f"{rows} x {k}{padding}", part["format"], name, place, str(part["panels"]), part["panel"]
