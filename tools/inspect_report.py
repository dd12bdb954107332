"""What `coremill inspect` knows about a model, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coremill.config.arena import ArenaGeometry
from coremill.config.errors import UnsupportedModelError
from coremill.config.formats import FORMATS, PANEL_ROWS, Format
from coremill.config.layout import MatrixRule, all_rules
from coremill.config.model_keys import shown
from coremill.config.options import default_of
from coremill.native.gguf import GGUFFile, open_gguf, type_name
from coremill.native.packfile import PackedMatrix, PackFile, is_pack, open_pack


def examine(path: Path, *, layout: bool = False) -> dict[str, Any]:
    """Everything inspect shows of a GGUF file or a pack; with `layout` also where each tensor goes.

    A model that coremill cannot run has `supported` false, `why`, and only what its file says.

    Raises:
        GGUFError, PackError: the file is malformed.
    """
    if is_pack(path):
        with open_pack(path) as pack:
            return _file_facts(path, "pack", path.stat().st_size) | _pack_facts(pack, layout)
    with open_gguf(path) as gguf:
        report = _file_facts(path, "gguf", gguf.nbytes) | {"files": len(gguf.paths), "version": gguf.version}
        try:
            from coremill.native.packer import preview_pack

            with preview_pack(gguf) as pack:
                return report | _pack_facts(pack, layout)
        except UnsupportedModelError as error:
            return report | _unsupported_facts(gguf, str(error))


def _file_facts(path: Path, kind: str, nbytes: int) -> dict[str, Any]:
    return {"path": str(path), "kind": kind, "bytes": nbytes}


def _unsupported_facts(gguf: GGUFFile, why: str) -> dict[str, Any]:
    from coremill.native.packer import count_parameters

    metadata, formats = gguf.metadata, {}
    for info in gguf.tensors.values():
        formats[type_name(info.format)] = formats.get(type_name(info.format), 0) + 1
    architecture = metadata.get("general.architecture")
    return {
        "supported": False,
        "why": why,
        "name": _text(metadata.get("general.name")),
        "architecture": _text(architecture),
        "license": _text(metadata.get("general.license")),
        "parameters": count_parameters(gguf),
        "formats": formats,
        "tokenizer": _tokenizer_facts(metadata),
    }


def _pack_facts(pack: PackFile, layout: bool) -> dict[str, Any]:
    spec = pack.spec
    facts = {
        "supported": True,
        "name": spec.name,
        "architecture": spec.architecture,
        "license": spec.license,
        "parameters": pack.description.get("num_parameters"),
        "formats": pack.description.get("formats"),
        "context_length": spec.context_length,
        "model": spec.to_dict(),
        "tokenizer": _tokenizer_facts(pack.tokenizer),
        "chat_template": pack.chat_template is not None,
        "memory": _memory_facts(pack),
    }
    return facts | ({"layout": _layout(pack)} if layout else {})


def _text(value: Any) -> str | None:
    """Any file may have anything there."""
    return value if value is None or isinstance(value, str) else shown(value)


def _tokenizer_facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    return {
        "model": _text(metadata.get("tokenizer.ggml.model")),
        "pre": _text(metadata.get("tokenizer.ggml.pre")),
        "tokens": len(tokens) if isinstance(tokens, Sequence) else None,
    }


def _memory_facts(pack: PackFile) -> dict[str, Any]:
    """What a run takes: weights once per host, scratch per worker, KV per token. At the default settings."""
    from coremill.worker.architectures import describe
    from coremill.worker.binding import scratch_bytes

    settings = {"step_tokens": default_of("step_tokens"), "max_active": default_of("max_active")}
    scratch = scratch_bytes(
        pack, describe(pack), max_step_tokens=settings["step_tokens"], max_sequences=settings["max_active"]
    )
    geometry = ArenaGeometry.for_model(pack.spec, 1)
    return {
        "weights": pack.data_length,
        "scratch_per_worker": scratch,
        "scratch_settings": settings,
        "kv_per_token": geometry.token_bytes,
        "kv_type": geometry.kv_type,
    }


# ---- layout ----


def _layout(pack: PackFile) -> list[dict[str, Any]]:
    """One entry per packed matrix and vector, in pack order."""
    entries: list[dict[str, Any]] = []
    for rule in all_rules(pack.spec):
        if isinstance(rule, MatrixRule):
            entries.append(_matrix_layout(rule, pack.matrices[rule.name]))
        elif rule.name in pack.vectors:
            vector = pack.vectors[rule.name]
            sources = [{"tensor": part.source, "shape": [part.rows]} for part in rule.parts]
            entry = {"name": rule.name, "kind": "vector", "length": vector.length, "offset": vector.offset}
            entries.append(entry | {"bytes": 4 * vector.length, "parts": sources})
    return entries


def _matrix_layout(rule: MatrixRule, matrix: PackedMatrix) -> dict[str, Any]:
    from coremill.native import lib

    parts = []
    for part, type_id, (_, first_row, rows) in zip(rule.parts, matrix.formats, matrix.parts, strict=True):
        fmt = FORMATS[type_id]
        parts.append(
            {
                "tensor": part.source,
                "format": fmt.name,
                "shape": [rows, rule.k],
                "file_bytes": rows * fmt.row_bytes(rule.k),
                "first_row": first_row,
                "panels": part.panels,
                "padding_rows": part.panels * PANEL_ROWS - rows,
                "panel_bytes": lib.cm_panel_bytes(type_id, rule.k),
                "panel": panel_shape(fmt, rule.k),
            }
        )
    return {
        "name": rule.name,
        "kind": "matrix",
        "fusion": rule.fusion if len(rule.parts) > 1 else None,
        "n": matrix.n,
        "k": matrix.k,
        "panels": matrix.num_panels,
        "offset": matrix.offset,
        "bytes": matrix.nbytes,
        "parts": parts,
    }


# Lines of 64 bytes that hold the codes of 32 inputs, and the scales of a block, by the kind of format.
_CODE_LINES = {"4": "4 lines", "5": "4+1 lines", "6": "4+2 lines", "8": "8 lines"}
_SCALES = {"_0": "d", "_1": "d,m", "4_K": "d,dmin,8 sc,8 mn", "5_K": "d,dmin,8 sc,8 mn", "6_K": "d,16 sc"}


def panel_shape(fmt: Format, k: int) -> str:
    """The planes of a panel in words: "[18 blocks][4 lines][16 rows][4 k] + [18][d,m][16]"."""
    if fmt.block_len == 1:
        return f"[{k}][{PANEL_ROWS} rows] {fmt.name.lower()}"
    scales = next(text for ending, text in _SCALES.items() if fmt.name.endswith(ending))
    codes = f"[{k // 32} blocks][{_CODE_LINES[fmt.name[1]]}][{PANEL_ROWS} rows][4 k]"
    return f"{codes} + [{k // fmt.block_len}][{scales}][{PANEL_ROWS}]"
