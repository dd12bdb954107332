"""GGUF files: metadata and tensor table, every length and offset checked before it is used.

The layout follows ggml's docs/gguf.md (versions 2 and 3, little-endian):

    "GGUF" u32 version, u64 tensors, u64 keys
    keys    x [string key, u32 type, value]              string = u64 length, UTF-8 bytes
    tensors x [string name, u32 dims, u64 shape[dims], u32 type, u64 offset]
    padding to general.alignment, then tensor data; offsets count from there

What a file claims never decides how much is allocated: counts are compared with the bytes that are left
first, arrays of numbers or booleans take the bytes they have in the file, and arrays of strings or arrays
are decoded element by element on access. Tensor bytes are read with pread (`read_into`), so that a file that shrinks
meanwhile is an error and not a signal, or seen through the mapping (`data`).
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coremill.config.errors import GGUFError
from coremill.config.formats import FORMATS
from coremill.config.printable import brief
from coremill.native.gguf_values import LEAST_BYTES, Cursor

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 255
MAX_DIMS = 4
MAX_PARTS = 1000

# GGML types that files may hold and coremill cannot compute with (yet): name, block length, block bytes.
_OTHER_TYPES: dict[int, tuple[str, int, int]] = {
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
GGML_TYPES: dict[int, tuple[str, int, int]] = _OTHER_TYPES | {
    f.type_id: (f.name, f.block_len, f.block_bytes) for f in FORMATS.values()
}

_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")


def type_name(type_id: int) -> str:
    """Name of a GGML type number, for messages."""
    return GGML_TYPES[type_id][0] if type_id in GGML_TYPES else f"type {type_id}"


def check_magic(path: object, start: bytes) -> None:
    """GGUFError unless a file whose first 4 bytes (fewer: all it has) are `start` may be a GGUF file."""
    if start != b"GGUF":
        raise GGUFError(path, "magic", f"is {start.decode('latin-1')!r}, not 'GGUF': this is not a GGUF file", 0)


def _label(name: str) -> str:
    """A name from a file as messages show it: quoted, short, and without control characters."""
    return repr(brief(name))


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. `shape` is in ggml order (innermost first); `offset` is absolute within file `part`."""

    name: str
    shape: tuple[int, ...]
    format: int
    offset: int
    nbytes: int
    part: int = 0


class _Part:
    """One file: its mapping, metadata and tensors (with `part` already set)."""

    def __init__(self, path: Path, index: int = 0) -> None:
        self.path, self.index = path, index
        self.fd, self.stat = _open_regular(path)
        try:
            self.size = self.stat.st_size
            if self.size < 24:
                raise GGUFError(path, "header", f"needs 24 bytes, but the file has {self.size}", 0)
            self.mapping = mmap.mmap(self.fd, self.size, mmap.MAP_SHARED, mmap.PROT_READ)
            self.metadata, self.tensors, self.version = self._parse(Cursor(path, self.mapping, self.size))
        except OSError as error:
            self.close()
            raise GGUFError(path, "file", f"cannot be mapped: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _parse(self, cursor: Cursor) -> tuple[dict[str, Any], dict[str, TensorInfo], int]:
        check_magic(cursor.path, cursor.buffer[cursor.take(4, "magic") : 4])
        version = cursor.u32("version")
        if version not in (2, 3):
            if version and not version & 0xFFFF:
                cursor.fail("version", "the file is big-endian; only little-endian files are supported", 4)
            cursor.fail("version", f"{version} is not supported; supported: 2, 3", 4)
        num_tensors = self._count(cursor, "tensor count", MAX_TENSORS, 8 + 1 + 4 + 8 + 4 + 8)
        num_keys = self._count(cursor, "metadata key count", MAX_KEYS, 8 + 1 + 4 + 1)
        metadata = self._read_metadata(cursor, num_keys)
        tensors = self._read_tensors(cursor, num_tensors, self._alignment(cursor, metadata))
        return metadata, tensors, version

    @staticmethod
    def _count(cursor: Cursor, field: str, limit: int, least_bytes: int) -> int:
        start = cursor.position
        count = cursor.u64(field)
        if count > limit:
            cursor.fail(field, f"{count} is more than the limit of {limit}", start)
        if count > cursor.size // least_bytes:
            cursor.fail(field, f"{count} entries do not fit in {cursor.size} bytes", start)
        return count

    @staticmethod
    def _read_metadata(cursor: Cursor, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            start = cursor.position
            key = cursor.string(f"metadata key {index}", MAX_KEY_BYTES)
            if not key or key in metadata:
                problem = f"{_label(key)} appears twice" if key else "is empty"
                cursor.fail(f"metadata key {index}", problem, start)
            type_start = cursor.position
            field = f"metadata {_label(key)}"
            type_id = cursor.u32(f"{field} type")
            if type_id not in LEAST_BYTES:
                cursor.fail(f"{field} type", f"{type_id} is not a GGUF value type", type_start)
            metadata[key] = cursor.value(type_id, field)
        return metadata

    @staticmethod
    def _alignment(cursor: Cursor, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        whole = isinstance(alignment, int) and not isinstance(alignment, bool)
        if not whole or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            problem = f"is {alignment!r}, not a power of two from 8 to {1 << 20}"
            cursor.fail("metadata 'general.alignment'", problem)
        return alignment

    def _read_tensors(self, cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
        entries: dict[str, tuple[TensorInfo, int]] = {}
        for index in range(count):
            start = cursor.position
            name = cursor.string(f"tensor {index} name", MAX_NAME_BYTES)
            if not name or name in entries:
                problem = f"{_label(name)} appears twice" if name else "is empty"
                cursor.fail(f"tensor {index} name", problem, start)
            entries[name] = self._read_tensor(cursor, name, alignment)
        data_start = -(-cursor.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, (info, where) in entries.items():
            end = data_start + info.offset + info.nbytes
            if end > self.size:
                problem = f"its data ends at byte {end}, but the file has {self.size}"
                cursor.fail(f"tensor {_label(name)} offset", problem, where)
            absolute = data_start + info.offset
            tensors[name] = TensorInfo(name, info.shape, info.format, absolute, info.nbytes, self.index)
        self._check_overlap(cursor, tensors, {name: where for name, (_, where) in entries.items()})
        return tensors

    @staticmethod
    def _read_tensor(cursor: Cursor, name: str, alignment: int) -> tuple[TensorInfo, int]:
        """A tensor with its offset as the file has it, and where in the file that offset stands."""
        field, start = f"tensor {_label(name)}", cursor.position
        num_dims = cursor.u32(f"{field} dimension count")
        if not 1 <= num_dims <= MAX_DIMS:
            cursor.fail(f"{field} dimension count", f"{num_dims} is not 1 to {MAX_DIMS}", start)
        shape, elements = [], 1
        for dim in range(num_dims):
            start = cursor.position
            length = cursor.u64(f"{field} dimension {dim}")
            elements *= length
            if not 0 < length < 1 << 63 or elements >= 1 << 63:
                cursor.fail(f"{field} dimension {dim}", f"{length} makes the tensor empty or too large", start)
            shape.append(length)
        start = cursor.position
        type_id = cursor.u32(f"{field} type")
        if type_id not in GGML_TYPES:
            cursor.fail(f"{field} type", f"{type_id} is not a GGML tensor type", start)
        type_label, block_len, block_bytes = GGML_TYPES[type_id]
        if shape[0] % block_len:
            cursor.fail(f"{field} type", f"{type_label} needs rows of a multiple of {block_len}, not {shape[0]}", start)
        where = cursor.position
        offset = cursor.u64(f"{field} offset")
        if offset % alignment:
            cursor.fail(f"{field} offset", f"{offset} is not a multiple of the alignment {alignment}", where)
        nbytes = elements // block_len * block_bytes
        return TensorInfo(name, tuple(shape), type_id, offset, nbytes), where

    @staticmethod
    def _check_overlap(cursor: Cursor, tensors: dict[str, TensorInfo], where: dict[str, int]) -> None:
        previous: TensorInfo | None = None
        for info in sorted(tensors.values(), key=lambda t: t.offset):
            if previous is not None and previous.offset + previous.nbytes > info.offset:
                problem = f"its data overlaps that of tensor {_label(previous.name)}"
                cursor.fail(f"tensor {_label(info.name)} offset", problem, where[info.name])
            previous = info


class GGUFFile:
    """An open model file, or all files of a split model as one.

    Attributes:
        path: the (first) file.
        paths: all files, in order.
        metadata: key -> int, float, bool, str, array.array of numbers, or a sequence of booleans, strings or arrays.
        tensors: name -> TensorInfo, in file order.
        version: GGUF version of the first file.
    """

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts
        self.path = parts[0].path
        self.paths = [part.path for part in parts]
        self.metadata = parts[0].metadata
        self.version = parts[0].version
        self.tensors: dict[str, TensorInfo] = {}
        for part in parts:
            for name, info in part.tensors.items():
                if name in self.tensors:
                    raise GGUFError(part.path, f"tensor '{name}'", "appears in two files of a split model")
                self.tensors[name] = info

    @property
    def nbytes(self) -> int:
        """Size of all files together."""
        return sum(part.size for part in self._parts)

    def stats(self) -> list[os.stat_result]:
        """What fstat said of each file when it was opened."""
        return [part.stat for part in self._parts]

    def data(self, name: str) -> memoryview:
        """The bytes of a tensor in the file's mapping. A file cut short meanwhile raises SIGBUS on access."""
        info = self.tensors[name]
        return memoryview(self._parts[info.part].mapping)[info.offset : info.offset + info.nbytes]

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the tensor's bytes from `start` on.

        Raises:
            GGUFError: the file is shorter than when it was opened, or cannot be read.
        """
        info = self.tensors[name]
        if start < 0 or start + len(buffer) > info.nbytes:
            raise ValueError(f"bytes {start} to {start + len(buffer)} are outside tensor '{name}'")
        part, done = self._parts[info.part], 0
        while done < len(buffer):
            position = info.offset + start + done
            try:
                count = os.preadv(part.fd, [buffer[done:]], position)
            except OSError as error:
                raise GGUFError(part.path, f"tensor '{name}'", f"read failed: {error.strerror}", position) from error
            if count == 0:
                raise GGUFError(part.path, f"tensor '{name}'", "the file was cut short while being read", position)
            done += count

    def chunks(self, chunk_bytes: int = 1 << 22) -> Iterator[memoryview]:
        """All bytes of all files in order; each view is valid until the next one is asked for."""
        buffer = memoryview(bytearray(chunk_bytes))
        for part in self._parts:
            position = 0
            while position < part.size:
                count = os.preadv(part.fd, [buffer[: part.size - position]], position)
                if count == 0:
                    raise GGUFError(part.path, "file", "was cut short while being read", position)
                yield buffer[:count]
                position += count

    def close(self) -> None:
        """Close the files. Metadata and views of tensors stay usable."""
        for part in self._parts:
            part.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF file; given any file of a split model, open and join all of them.

    Raises:
        GGUFError: a file is malformed, missing or unreadable; names the field and the byte offset.
    """
    path = Path(path)
    parts = [_Part(path)]
    try:
        count = _split_number(parts[0], "split.count", 0, MAX_PARTS, default=0)
        if count > 1:
            parts = _open_split(parts[0], count)
        return GGUFFile(parts)
    except BaseException:
        for part in parts:
            part.close()
        raise


def _open_split(given: _Part, count: int) -> list[_Part]:
    given.close()
    match = _SPLIT_NAME.fullmatch(given.path.name)
    if match is None or int(match["count"]) != count:
        problem = f"is {count}, but the file is not named like NAME-00001-of-{count:05d}.gguf"
        raise GGUFError(given.path, "metadata 'split.count'", problem)
    parts: list[_Part] = []
    try:
        for index in range(count):
            part = _Part(given.path.with_name(f"{match['stem']}-{index + 1:05d}-of-{count:05d}.gguf"), index)
            parts.append(part)
            if _split_number(part, "split.count", 0, MAX_PARTS) != count:
                raise GGUFError(part.path, "metadata 'split.count'", f"is not {count} as in {given.path.name}")
            if _split_number(part, "split.no", 0, MAX_PARTS) != index:
                raise GGUFError(part.path, "metadata 'split.no'", f"is not {index} as the file's name says")
        total = sum(len(part.tensors) for part in parts)
        expected = _split_number(parts[0], "split.tensors.count", 0, MAX_TENSORS)
        if total != expected:
            problem = f"is {expected}, but the files have {total} tensors"
            raise GGUFError(parts[0].path, "metadata 'split.tensors.count'", problem)
    except BaseException:
        for part in parts:
            part.close()
        raise
    return parts


def _split_number(part: _Part, key: str, low: int, high: int, default: int | None = None) -> int:
    value = part.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise GGUFError(part.path, f"metadata '{key}'", f"is {value!r}, not a whole number of {low} to {high}")
    return value


def _open_regular(path: Path) -> tuple[int, os.stat_result]:
    """Open without waiting on pipes; only regular files have a size that can be trusted."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise GGUFError(path, "file", f"cannot be opened: {problem}") from error
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise GGUFError(path, "file", "is not a regular file")
    return fd, info
