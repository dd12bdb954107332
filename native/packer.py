"""From an open GGUF file to a pack file, in one streaming pass.

Everything about the pack is known before its first byte is written: the layout follows from the description
and the formats. So the file is allocated whole (a full disk is noticed at once), filled a few megabytes
at a time through `cm_pack_panels`, and appears under its name only when complete and synced.
"""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coremill.config.errors import UnsupportedModelError
from coremill.config.formats import BF16, F16, F32, FORMATS, PANEL_ROWS
from coremill.config.layout import MatrixRule, VectorRule, layout
from coremill.config.model import ModelSpec
from coremill.native.gguf import GGUFFile, type_name
from coremill.native.output import output_file
from coremill.native.packfile import (
    DATA_ALIGN,
    HEADER_BYTES,
    PANEL_ENTRY,
    SECTION_ALIGN,
    SECTIONS,
    TENSOR_ALIGN,
    VECTOR_ALIGN,
    PackFile,
    build_header,
)
from coremill.native.token_bytes import build_token_bytes

# Source bytes handled at a time; also about what packing needs beside its code.
CHUNK_BYTES = 1 << 20

Progress = Callable[[str, int, int], None]  # stage ("hashing", "packing", ...), bytes done, bytes in all


@dataclass(slots=True)
class MatrixPlan:
    """Where a matrix goes. Offsets count from the start of the data."""

    rule: MatrixRule
    formats: tuple[int, ...]
    panel_bytes: tuple[int, ...]
    table_offset: int = 0
    offset: int = 0
    checksum: int = 0

    @property
    def nbytes(self) -> int:
        return sum(p.panels * b for p, b in zip(self.rule.parts, self.panel_bytes, strict=True))

    def panel_offset(self, part: int, panel: int) -> int:
        """Start of a part's panel, from the start of the matrix."""
        if self.rule.fusion == "interleave":
            return panel * sum(self.panel_bytes) + sum(self.panel_bytes[:part])
        before = sum(self.rule.parts[i].panels * self.panel_bytes[i] for i in range(part))
        return before + panel * self.panel_bytes[part]

    def table(self) -> bytes:
        entries = bytearray()
        for index in range(self.rule.num_panels):
            part, panel = self.rule.panel_source(index)
            entries += PANEL_ENTRY.pack(self.offset + self.panel_offset(part, panel), self.formats[part], 0)
        return bytes(entries)


@dataclass(slots=True)
class VectorPlan:
    rule: VectorRule
    offset: int = 0
    checksum: int = 0


class PackPlan:
    """What a model's pack will hold and where.

    Attributes:
        spec, matrices, vectors: in pack order.
        tables_len: bytes of all panel tables, which come first.
        data_length: bytes of the data.

    Raises:
        UnsupportedModelError: see ModelSpec.from_gguf and layout; also a tensor format without kernels.
    """

    def __init__(self, gguf: GGUFFile) -> None:
        self.spec = ModelSpec.from_gguf(gguf.metadata, gguf.tensors)
        self.matrices: list[MatrixPlan] = []
        self.vectors: list[VectorPlan] = []
        for rule in layout(self.spec, gguf.tensors):
            if isinstance(rule, MatrixRule):
                self.matrices.append(_plan_matrix(rule, gguf))
            else:
                _check_vector_formats(rule, gguf)
                self.vectors.append(VectorPlan(rule))
        self._place()

    def _place(self) -> None:
        position = 0
        for matrix in self.matrices:
            matrix.table_offset = position
            position = _align(position + matrix.rule.num_panels * PANEL_ENTRY.size, 64)
        self.tables_len = position
        for matrix in self.matrices:
            matrix.offset = _align(position, TENSOR_ALIGN)
            position = matrix.offset + matrix.nbytes
        for vector in self.vectors:
            vector.offset = _align(position, VECTOR_ALIGN)
            position = vector.offset + 4 * vector.rule.length
        self.data_length = _align(position, TENSOR_ALIGN)


def _plan_matrix(rule: MatrixRule, gguf: GGUFFile) -> MatrixPlan:
    from coremill.native import lib

    formats = tuple(gguf.tensors[part.source].format for part in rule.parts)
    for part, type_id in zip(rule.parts, formats, strict=True):
        if type_id not in FORMATS:
            known = ", ".join(f.name for f in FORMATS.values())
            raise UnsupportedModelError(
                f"tensor '{part.source}' has format {type_name(type_id)}, which is not supported; supported: {known}"
            )
    return MatrixPlan(rule, formats, tuple(lib.cm_panel_bytes(f, rule.k) for f in formats))


def _check_vector_formats(rule: VectorRule, gguf: GGUFFile) -> None:
    for part in rule.parts:
        if part.source in gguf.tensors and gguf.tensors[part.source].format not in _TO_F32:
            name = type_name(gguf.tensors[part.source].format)
            raise UnsupportedModelError(
                f"tensor '{part.source}' has format {name}, which is not supported for a vector; "
                "supported: F32, F16, BF16"
            )


def write_pack(
    gguf: GGUFFile,
    out: Path,
    key: str,
    source: dict[str, Any],
    progress: Progress | None = None,
    before_publishing: Callable[[], None] | None = None,
    in_cache: bool = True,
) -> None:
    """Pack a model into `out`, which appears complete or not at all.

    `key` is its content key in hex (16 bytes), `source` what the description says of where it came from;
    `before_publishing` may refuse the finished pack by raising; `in_cache` is for the advice when writing fails.

    Raises:
        UnsupportedModelError: the model needs something coremill lacks; nothing was written.
        GGUFError: the source was cut short meanwhile.
        PackError: the disk is full, or the folder or file cannot be written; names the remedy.
    """
    plan = PackPlan(gguf)
    frame = _Frame(gguf, plan, source)
    with output_file(out, frame.data_offset + plan.data_length, in_cache=in_cache) as fd:
        _write_matrices(fd, gguf, plan, frame.data_offset, progress or _no_progress)
        frame.write(fd, gguf, key)
        if before_publishing:
            before_publishing()


def preview_pack(gguf: GGUFFile) -> PackFile:
    """The pack a model would get, with holes for its matrices, in anonymous memory that only the rest takes.

    For questions about a model that are not worth packing it. Raises UnsupportedModelError as `write_pack` does.
    """
    plan = PackPlan(gguf)
    frame = _Frame(gguf, plan, {"name": gguf.path.name})
    fd = os.memfd_create("coremill-preview", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, frame.data_offset + plan.data_length)
        frame.write(fd, gguf, "00" * 16)
        return PackFile(gguf.path, fd, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise


class _Frame:
    """Everything of a pack but the matrices: header, sections, panel tables, vectors."""

    def __init__(self, gguf: GGUFFile, plan: PackPlan, source: dict[str, Any]) -> None:
        self.plan = plan
        self.sections = _small_sections(gguf, plan, source)
        # The directory holds checksums of the data, so its room is found with zeros in their place.
        self.sections["directory"] = _directory(plan, 0)
        self.offsets, offset = {}, HEADER_BYTES
        for name in SECTIONS:
            self.offsets[name] = offset
            offset = _align(offset + len(self.sections[name]), SECTION_ALIGN)
        self.data_offset = _align(offset, DATA_ALIGN)

    def write(self, fd: int, gguf: GGUFFile, key: str) -> None:
        """Once the plan has the checksums of the matrices."""
        tables_checksum = _write_tables(fd, self.plan, self.data_offset)
        _write_vectors(fd, gguf, self.plan, self.data_offset)
        self.sections["directory"] = _directory(self.plan, tables_checksum)
        where = {}
        for name in SECTIONS:
            content, offset = self.sections[name], self.offsets[name]
            where[name] = (zlib.crc32(content), offset, len(content))
            _write(fd, content, offset)
        _write(fd, build_header(key, where, self.data_offset, self.plan.data_length), 0)


def _small_sections(gguf: GGUFFile, plan: PackPlan, source: dict[str, Any]) -> dict[str, bytes]:
    import msgpack

    tokenizer = {
        key: value.tolist() if hasattr(value, "tolist") else value
        for key, value in gguf.metadata.items()
        if key.startswith("tokenizer.")
    }
    general = {
        key: value
        for key, value in gguf.metadata.items()
        if key.startswith("general.") and isinstance(value, (str, int, float))
    }
    histogram: dict[str, int] = {}
    for info in gguf.tensors.values():
        histogram[type_name(info.format)] = histogram.get(type_name(info.format), 0) + 1
    description = {
        "spec": plan.spec.to_dict(),
        "general": general,
        "source": source,
        "num_parameters": count_parameters(gguf),
        "formats": histogram,
    }
    template = tokenizer.get("tokenizer.chat_template")
    return {
        "description": msgpack.packb(description),
        "tokenizer": msgpack.packb(tokenizer),
        "token_bytes": build_token_bytes(tokenizer),
        "chat_template": template.encode() if isinstance(template, str) else b"",
    }


def count_parameters(gguf: GGUFFile) -> int:
    """Elements of all tensors, as a model's size is usually given."""
    total = 0
    for info in gguf.tensors.values():
        elements = 1
        for length in info.shape:
            elements *= length
        total += elements
    return total


def _directory(plan: PackPlan, tables_checksum: int) -> bytes:
    """See PackFile._read_directory. Its length does not depend on the checksums."""
    import msgpack

    def checksum(value: int) -> int:
        return value | 1 << 32  # past 32 bits msgpack takes the same 9 bytes for every value

    matrices = {
        m.rule.name: [m.table_offset, m.offset, m.nbytes, checksum(m.checksum), list(m.formats)] for m in plan.matrices
    }
    vectors = {v.rule.name: [v.offset, v.rule.length, checksum(v.checksum)] for v in plan.vectors}
    tables = [0, plan.tables_len, checksum(tables_checksum)]
    return msgpack.packb({"panel_tables": tables, "matrices": matrices, "vectors": vectors})


# ---- data ----


def _write_tables(fd: int, plan: PackPlan, data_offset: int) -> int:
    tables = bytearray(plan.tables_len)
    for matrix in plan.matrices:
        table = matrix.table()
        tables[matrix.table_offset : matrix.table_offset + len(table)] = table
    _write(fd, tables, data_offset)
    return zlib.crc32(tables)


def _write_matrices(fd: int, gguf: GGUFFile, plan: PackPlan, data_offset: int, progress: Progress) -> None:
    total = sum(matrix.nbytes for matrix in plan.matrices)
    done = 0
    for matrix in plan.matrices:
        position = data_offset + matrix.offset
        for piece in _packed_pieces(gguf, matrix):
            _write(fd, piece, position)
            matrix.checksum = zlib.crc32(piece, matrix.checksum)
            position += len(piece)
            done += len(piece)
            progress("packing", done, total)


def _packed_pieces(gguf: GGUFFile, matrix: MatrixPlan) -> Iterator[memoryview]:
    """The panels of a matrix in order, some at a time; each view is valid until the next one is asked for."""
    if matrix.rule.fusion == "interleave":
        yield from _pack_runs(gguf, matrix, tuple(range(len(matrix.rule.parts))))
    else:
        for part in range(len(matrix.rule.parts)):
            yield from _pack_runs(gguf, matrix, (part,))


def _pack_runs(gguf: GGUFFile, matrix: MatrixPlan, parts: tuple[int, ...]) -> Iterator[memoryview]:
    """Panels of one part, or of several equally long parts in turn."""
    from coremill.native import ffi, lib

    k, num_rows = matrix.rule.k, matrix.rule.parts[parts[0]].rows
    row_bytes = [FORMATS[matrix.formats[p]].row_bytes(k) for p in parts]
    panel_bytes = [matrix.panel_bytes[p] for p in parts]
    stride = sum(panel_bytes)
    panels_at_once = max(1, CHUNK_BYTES // (sum(row_bytes) * PANEL_ROWS))
    rows_at_once = min(num_rows, panels_at_once * PANEL_ROWS)
    source = memoryview(bytearray(rows_at_once * max(row_bytes)))
    packed = memoryview(bytearray(-(-rows_at_once // PANEL_ROWS) * stride))
    for row in range(0, num_rows, rows_at_once):
        rows = min(rows_at_once, num_rows - row)
        used = -(-rows // PANEL_ROWS) * stride
        begin = 0
        for i, part in enumerate(parts):
            chunk = source[: rows * row_bytes[i]]
            gguf.read_into(matrix.rule.parts[part].source, row * row_bytes[i], chunk)
            dst = packed[begin:used]
            if lib.cm_pack_panels(
                matrix.formats[part],
                ffi.from_buffer(chunk),
                len(chunk),
                k,
                rows,
                ffi.from_buffer(dst),
                len(dst),
                stride,
            ):
                raise AssertionError(f"panel sizes of '{matrix.rule.name}' do not fit each other")
            begin += panel_bytes[i]
        yield packed[:used]


def _write_vectors(fd: int, gguf: GGUFFile, plan: PackPlan, data_offset: int) -> None:
    for vector in plan.vectors:
        values = _vector_values(gguf, vector.rule)
        vector.checksum = zlib.crc32(values)
        _write(fd, values, data_offset + vector.offset)


def _vector_values(gguf: GGUFFile, rule: VectorRule) -> bytearray:
    """f32 bytes; a bias has its parts where its matrix has their rows."""
    values = bytearray(4 * rule.length)
    for index, part in enumerate(rule.parts):
        if part.source not in gguf.tensors:
            continue
        info = gguf.tensors[part.source]
        raw = memoryview(bytearray(info.nbytes))
        gguf.read_into(part.source, 0, raw)
        floats = _TO_F32[info.format](raw)
        if rule.matrix is None:
            values[: len(floats)] = floats
            continue
        step = len(rule.parts) if rule.matrix.fusion == "interleave" else 1
        start = rule.matrix.first_row(index)
        for panel in range(part.panels):
            piece = floats[panel * PANEL_ROWS * 4 : (panel + 1) * PANEL_ROWS * 4]
            at = 4 * (start + panel * step * PANEL_ROWS)
            values[at : at + len(piece)] = piece
    return values


def _f16_to_f32(raw: memoryview) -> bytes:
    return array("f", struct.unpack(f"<{len(raw) // 2}e", raw)).tobytes()


def _bf16_to_f32(raw: memoryview) -> bytes:
    return array("I", (value << 16 for value in raw.cast("H"))).tobytes()


_TO_F32: dict[int, Callable[[memoryview], bytes]] = {
    F32.type_id: bytes,
    F16.type_id: _f16_to_f32,
    BF16.type_id: _bf16_to_f32,
}


def _no_progress(stage: str, done: int, total: int) -> None:
    pass


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


def _write(fd: int, data: bytes | bytearray | memoryview, position: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], position + done)
