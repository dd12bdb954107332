"""Pack files: a model in the layout the kernels read, in one file that is mapped and used as it is.

    0         header, 4 KiB: magic, version, key, sizes, section table, checksum of itself
    4 KiB..   sections, each on 4 KiB: description, directory, tokenizer, token bytes, chat template
    2 MiB..   data, all offsets below count from here:
                  panel tables (cm_panel[num_panels] of each matrix, on 64 bytes)
                  matrices, each on 4 KiB: panels on 64 bytes
                  vectors, f32, each on 64 bytes

A pack is a foreign file like any other: before an offset is handed out, header, sections, directory and
panel tables are checked against the file's size and against what the model's description implies.
Checksums of the small parts and of the panel tables are checked when they are read, those of matrices and
vectors by `verify`.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from coremill.config.errors import ModelError, PackError
from coremill.config.formats import FORMATS
from coremill.config.layout import MatrixRule, Rule, VectorRule, all_rules
from coremill.config.model import ModelSpec
from coremill.native.token_bytes import TokenBytes

MAGIC = b"CMPACK\r\n"
# Raise when the bytes of a pack change meaning: old packs then miss in the cache and are made anew.
PACK_VERSION = 2
HEADER_BYTES = 4096
SECTION_ALIGN = 4096
TENSOR_ALIGN = 4096
VECTOR_ALIGN = 64
DATA_ALIGN = 2 << 20

SECTIONS = ("description", "directory", "tokenizer", "token_bytes", "chat_template")
_FIXED = struct.Struct("<8sII16sQQQ")  # magic, version, sections, key, file bytes, data offset, data bytes
_SECTION = struct.Struct("<IIQQ")  # index in SECTIONS, crc32, offset, bytes
_CHECKSUM = struct.Struct("<I")
_CRC = 0xFFFFFFFF  # checksums in the directory have bit 32 set as well, to be packed at one width
PANEL_ENTRY = struct.Struct("<QII")  # cm_panel: offset, format, reserved


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Which file this is and whether it was touched, as far as the file system says."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: str | os.PathLike[str], info: os.stat_result | None = None) -> FileIdentity:
        info = os.stat(path) if info is None else info
        return cls(os.fspath(path), info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)

    @property
    def marks(self) -> tuple[int, int, int, int, int]:
        """Everything but the name."""
        return self.device, self.inode, self.size, self.mtime_ns, self.ctime_ns

    def change(self) -> str | None:
        """What has happened to the file since, in words, or None."""
        try:
            now = FileIdentity.of(self.path)
        except OSError as error:
            return f"{self.path}: {error.strerror}"
        if now.marks == self.marks:
            return None
        what = "replaced" if (now.device, now.inode) != (self.device, self.inode) else "changed"
        return f"{self.path}: the file was {what}"


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """An R16 matrix. Offsets count from the start of the data.

    Attributes:
        n, k: outputs and inputs; num_panels * 16 >= n.
        panels_offset: table of num_panels cm_panel entries.
        parts: (name, first_row, rows) of each fused tensor; parts of an interleaved matrix alternate panels.
        formats: type number of each part.
        offset, nbytes, checksum: the panels as a whole, crc32.
    """

    n: int
    k: int
    num_panels: int
    panels_offset: int
    parts: tuple[tuple[str, int, int], ...]
    formats: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class PackedVector:
    """`length` f32 values at `offset` from the start of the data."""

    offset: int
    length: int
    checksum: int


class PackFile:
    """An open, checked pack.

    Attributes:
        path, fd: the file, open for reading until `close`; map `fd`, not the path, which may be replaced.
        identity: what the file system said of the file when it was opened.
        spec: the model's description.
        key: hex name of the content: of the source's bytes and the pack version.
        description: what `inspect` shows of the source (name, sizes, hash, general.* metadata).
        matrices, vectors: by packed name, in pack order.
        data_offset, data_length: where the data lies in the file; data_offset is a multiple of 2 MiB.
        panel_tables: (offset, bytes, crc32) of all panel tables together, in the data.
    """

    def __init__(self, path: Path, fd: int, info: os.stat_result) -> None:
        self.path, self.fd = path, fd
        self.identity = FileIdentity.of(path, info)
        self.key, self._sections, self.data_offset, self.data_length = _read_header(path, fd, info.st_size)
        try:
            self._mapping = mmap.mmap(fd, info.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:  # nothing is wrong with the file, so no PackError, which would have it packed anew
            limit = "; the limit on address space is too small (`ulimit -v`)" if error.errno == errno.ENOMEM else ""
            raise ModelError(f"{path}: {info.st_size} bytes cannot be mapped: {error.strerror}{limit}") from error
        self.description: dict[str, Any] = self._unpack("description")
        self.spec = self._read_spec()
        self.matrices: dict[str, PackedMatrix] = {}
        self.vectors: dict[str, PackedVector] = {}
        self.panel_tables: tuple[int, int, int] = (0, 0, 0)
        self._read_directory()

    # ---- sections ----

    def _section(self, name: str) -> memoryview:
        crc, offset, length = self._sections[name]
        view = memoryview(self._mapping)[offset : offset + length]
        if zlib.crc32(view) != crc:
            raise self._bad(f"section '{name}'", "its checksum does not match")
        return view

    def _unpack(self, name: str) -> dict[str, Any]:
        import msgpack

        try:
            value = msgpack.unpackb(self._section(name))
        except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
            raise self._bad(f"section '{name}'", f"is not readable: {error}") from error
        if not isinstance(value, dict):
            raise self._bad(f"section '{name}'", "is not a map")
        return value

    @cached_property
    def tokenizer(self) -> dict[str, Any]:
        """The raw tokenizer.* metadata of the source, arrays as lists. Empty when it had none."""
        return self._unpack("tokenizer")

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """id -> bytes."""
        table = TokenBytes(self._section("token_bytes"))
        if len(table) not in (0, self.spec.vocab_size):
            raise self._bad("section 'token_bytes'", f"has {len(table)} of {self.spec.vocab_size} tokens")
        return table

    @cached_property
    def chat_template(self) -> str | None:
        """The model's own chat template, Jinja source; untrusted."""
        try:
            return str(self._section("chat_template"), "utf-8") or None
        except UnicodeDecodeError as error:
            raise self._bad("section 'chat_template'", "is not valid UTF-8") from error

    def _bad(self, field: str, problem: str) -> PackError:
        return PackError(f"{self.path}: {field}: {problem}; remove the file and pack the model again")

    # ---- description and directory ----

    def _read_spec(self) -> ModelSpec:
        try:
            return ModelSpec.from_dict(self.description.get("spec"))
        except ModelError as error:
            raise self._bad("section 'description'", str(error)) from error

    def _read_directory(self) -> None:
        directory = self._unpack("directory")
        entries = {kind: directory.get(kind) for kind in ("matrices", "vectors")}
        if not all(isinstance(value, dict) for value in entries.values()):
            raise self._bad("section 'directory'", "has no maps 'matrices' and 'vectors'")
        tables = _whole_numbers(directory.get("panel_tables"), 3)
        if tables is None or not self._within(tables[0], tables[1], 64):
            raise self._bad("section 'directory'", "its panel tables lie outside the data")
        self.panel_tables = (tables[0], tables[1], tables[2] & _CRC)
        # A table that is wrong but well-formed would make the kernels read another panel.
        self._check_data("the panel tables", *self.panel_tables)
        for rule in self._expected_rules():
            kind = "matrices" if isinstance(rule, MatrixRule) else "vectors"
            entry = entries[kind].pop(rule.name, None)
            if entry is None and isinstance(rule, VectorRule) and rule.optional:
                continue
            if isinstance(rule, MatrixRule):
                self.matrices[rule.name] = self._read_matrix(rule, entry)
            else:
                self.vectors[rule.name] = self._read_vector(rule, entry)
        for name in [*entries["matrices"], *entries["vectors"]]:
            raise self._bad(f"tensor '{name}'", f"has no place in a '{self.spec.architecture}' model")

    def _expected_rules(self) -> Iterator[Rule]:
        try:
            return all_rules(self.spec)
        except ModelError as error:
            raise self._bad("section 'description'", str(error)) from error

    def _read_matrix(self, rule: MatrixRule, entry: Any) -> PackedMatrix:
        from coremill.native import ffi, lib

        entry = entry if isinstance(entry, list) and len(entry) == 5 else [None] * 5
        numbers, formats = _whole_numbers(entry[:4], 4), _whole_numbers(entry[4], len(rule.parts))
        if numbers is None or formats is None:
            raise self._bad(f"matrix '{rule.name}'", "its entry in the directory is missing or malformed")
        table, offset, nbytes, checksum = numbers
        if any(type_id not in FORMATS for type_id in formats):
            raise self._bad(f"matrix '{rule.name}'", f"its formats {formats} are not all known")
        table_len = rule.num_panels * PANEL_ENTRY.size
        begin, length, _ = self.panel_tables
        if not begin <= table <= begin + length - table_len or table % 64:
            raise self._bad(f"matrix '{rule.name}'", f"its panel table at {table} lies outside the panel tables")
        if not self._within(offset, nbytes, TENSOR_ALIGN):
            raise self._bad(f"matrix '{rule.name}'", f"bytes {offset} to {offset + nbytes} lie outside the data")
        view = memoryview(self._mapping)[self.data_offset + table :][:table_len]
        wrong = lib.cm_pack_check_panels(ffi.from_buffer(view), table_len, rule.k, offset, offset + nbytes)
        if wrong >= 0:
            raise self._bad(f"matrix '{rule.name}'", f"panel {wrong} has a bad format, offset or alignment")
        parts = tuple((p.source.removesuffix(".weight"), rule.first_row(i), p.rows) for i, p in enumerate(rule.parts))
        return PackedMatrix(rule.n, rule.k, rule.num_panels, table, parts, formats, offset, nbytes, checksum & _CRC)

    def _read_vector(self, rule: VectorRule, entry: Any) -> PackedVector:
        numbers = _whole_numbers(entry, 3)
        if numbers is None or numbers[1] != rule.length:
            raise self._bad(f"vector '{rule.name}'", f"is missing or not {rule.length} long")
        if not self._within(numbers[0], 4 * numbers[1], VECTOR_ALIGN):
            raise self._bad(f"vector '{rule.name}'", f"offset {numbers[0]} lies outside the data")
        return PackedVector(numbers[0], numbers[1], numbers[2] & _CRC)

    def _within(self, offset: int, nbytes: int, align: int) -> bool:
        return offset % align == 0 and offset + nbytes <= self.data_length

    # ---- the whole ----

    def data(self, offset: int, nbytes: int) -> memoryview:
        """A view of the data, for tests and tools; workers map `fd` themselves."""
        start = self.data_offset + offset
        return memoryview(self._mapping)[start : start + nbytes]

    def check_sections(self) -> None:
        """Compare the checksums of all sections, also of those that are read later. PackError names the first wrong."""
        for name in SECTIONS:
            self._section(name)

    def verify(self) -> None:
        """Read everything and compare checksums.

        Raises:
            PackError: naming the first part that does not match.
        """
        self.check_sections()
        for name, m in self.matrices.items():
            self._check_data(f"matrix '{name}'", m.offset, m.nbytes, m.checksum)
        for name, v in self.vectors.items():
            self._check_data(f"vector '{name}'", v.offset, 4 * v.length, v.checksum)

    def _check_data(self, name: str, offset: int, nbytes: int, crc: int) -> None:
        if zlib.crc32(self.data(offset, nbytes)) != crc:
            raise self._bad(name, "the checksum does not match")

    def close(self) -> None:
        """Close the file. What was read from it stays usable."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> PackFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_pack(path: str | os.PathLike[str], *, verify: bool = False) -> PackFile:
    """Open and check a pack; with `verify` also compare all checksums, which reads the whole file.

    Raises:
        PackError: the file is not a pack, of another version, damaged, or cannot be read.
        ModelError: it is too large for the address space.
    """
    path = Path(path)
    fd, info = _open_file(path)
    try:
        pack = PackFile(path, fd, info)
        if verify:
            pack.verify()
        return pack
    except BaseException:
        os.close(fd)
        raise


def is_pack(path: str | os.PathLike[str]) -> bool:
    """Whether a regular file starts like a pack. Raises ModelError when it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error


def pack_is_usable(path: Path, key: str) -> bool:
    """Whether a pack with this key lies at `path` that is right in everything but, unread here, its weights.

    Takes two milliseconds: everybody who starts asks.
    """
    if not path.exists():
        return False
    try:
        with open_pack(path) as pack:
            pack.check_sections()
            return pack.key == key
    except PackError:
        return False


def build_header(key: str, sections: dict[str, tuple[int, int, int]], data_offset: int, data_length: int) -> bytes:
    """The first 4 KiB. `sections`: name -> (crc32, offset, bytes)."""
    fixed = _FIXED.pack(
        MAGIC, PACK_VERSION, len(sections), bytes.fromhex(key), data_offset + data_length, data_offset, data_length
    )
    table = b"".join(_SECTION.pack(SECTIONS.index(name), *where) for name, where in sections.items())
    body = (fixed + table).ljust(HEADER_BYTES - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(zlib.crc32(body))


def _open_file(path: Path) -> tuple[int, os.stat_result]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise PackError(f"{path}: cannot be opened: {error.strerror}") from error
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise PackError(f"{path}: is not a regular file")
    return fd, info


def _read_header(path: Path, fd: int, size: int) -> tuple[str, dict[str, tuple[int, int, int]], int, int]:
    """Key, sections, data offset and data length; everything lies within the file."""

    def bad(problem: str) -> PackError:
        return PackError(f"{path}: pack header: {problem}; remove the file and pack the model again")

    header = os.pread(fd, HEADER_BYTES, 0)
    if not header.startswith(MAGIC):
        raise PackError(f"{path}: is not a pack file")
    if len(header) < HEADER_BYTES:
        raise bad(f"the file ends after {len(header)} bytes")
    _, version, num_sections, key, file_bytes, data_offset, data_length = _FIXED.unpack_from(header)
    if version != PACK_VERSION:
        raise bad(f"its version is {version}, this coremill reads {PACK_VERSION}")
    body = header[: -_CHECKSUM.size]
    if _CHECKSUM.unpack_from(header, len(body))[0] != zlib.crc32(body):
        raise bad("its checksum does not match")
    if file_bytes != size or data_offset + data_length != size:
        raise bad(f"it describes {file_bytes} bytes, but the file has {size}")
    if data_offset % DATA_ALIGN or num_sections != len(SECTIONS):
        raise bad("the data is not aligned or a section is missing")
    sections: dict[str, tuple[int, int, int]] = {}
    for i in range(num_sections):
        index, crc, offset, length = _SECTION.unpack_from(header, _FIXED.size + i * _SECTION.size)
        if index != i or offset % SECTION_ALIGN or offset + length > data_offset:
            raise bad(f"section {i} lies outside the file")
        sections[SECTIONS[i]] = (crc, offset, length)
    return key.hex(), sections, data_offset, data_length


def _whole_numbers(values: Any, count: int) -> tuple[int, ...] | None:
    """`values` as a tuple if it is a list of `count` whole numbers from 0 to 2**63, else None."""
    if not isinstance(values, list) or len(values) != count:
        return None
    good = all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 63 for v in values)
    return tuple(values) if good else None
