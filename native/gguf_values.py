"""Reading single values of a GGUF file: numbers, strings and arrays, each checked against the bytes that are left."""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from coremill.config.errors import GGUFError

MAX_STRING_BYTES = 1 << 26
MAX_NESTING = 4

# Metadata value types: number -> (struct code, bytes). The codes are also array.array's.
_NUMBERS = {
    0: ("B", 1),
    1: ("b", 1),
    2: ("H", 2),
    3: ("h", 2),
    4: ("I", 4),
    5: ("i", 4),
    6: ("f", 4),
    10: ("Q", 8),
    11: ("q", 8),
    12: ("d", 8),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LENGTH = struct.Struct("<Q")
# The fewest bytes an element can take: what a count is checked against.
LEAST_BYTES = {_BOOL: 1, _STRING: 8, _ARRAY: 12} | {number: size for number, (_, size) in _NUMBERS.items()}


class GGUFArray(Sequence):
    """A metadata array of strings or of arrays, checked at opening, decoded at access."""

    def __init__(self, cursor: Cursor, element: int, starts: array, field: str, depth: int) -> None:
        self._cursor, self._element, self._starts = cursor, element, starts
        self._field, self._depth = field, depth

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._decode(start) for start in self._starts[index]]
        return self._decode(self._starts[index])

    def __iter__(self) -> Iterator[Any]:
        return map(self._decode, self._starts)

    def _decode(self, start: int) -> Any:
        whole = self._cursor
        if self._element == _STRING:  # checked at opening
            body = start + 8
            (length,) = _LENGTH.unpack_from(whole.buffer, start)
            return str(whole.buffer[body : body + length], "utf-8")
        return Cursor(whole.path, whole.buffer, whole.size, start).array(self._field, self._depth + 1)

    def tolist(self) -> list[Any]:
        return [item.tolist() if hasattr(item, "tolist") else item for item in self]


class GGUFBools(Sequence):
    """A metadata array of booleans: the file's bytes, each 0 or 1."""

    def __init__(self, values: bytes) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        found = self._values[index]
        return list(map(bool, found)) if isinstance(index, slice) else bool(found)

    def __iter__(self) -> Iterator[bool]:
        return map(bool, self._values)

    def tolist(self) -> list[bool]:
        return list(self)


class Cursor:
    """Reads values one after the other; every read names the field it is for."""

    def __init__(self, path: Path, buffer: mmap.mmap, size: int, position: int = 0) -> None:
        self.path, self.buffer, self.size, self.position = path, buffer, size, position

    def fail(self, field: str, problem: str, offset: int | None = None) -> NoReturn:
        raise GGUFError(self.path, field, problem, self.position if offset is None else offset)

    def take(self, count: int, field: str) -> int:
        """Claim `count` bytes; returns where they start."""
        start = self.position
        if count > self.size - start:
            self.fail(field, f"needs {count} bytes, but the file ends after {self.size - start}")
        self.position = start + count
        return start

    def number(self, code: str, size: int, field: str) -> Any:
        return struct.unpack_from("<" + code, self.buffer, self.take(size, field))[0]

    def u32(self, field: str) -> int:
        return self.number("I", 4, field)

    def u64(self, field: str) -> int:
        return self.number("Q", 8, field)

    def string(self, field: str, max_bytes: int = MAX_STRING_BYTES) -> str:
        start = self.position
        length = self.u64(f"{field} length")
        if length > max_bytes:
            self.fail(f"{field} length", f"{length} is more than the limit of {max_bytes} bytes", start)
        body = self.take(length, field)
        try:
            return str(self.buffer[body : body + length], "utf-8")
        except UnicodeDecodeError:
            self.fail(field, "is not valid UTF-8", body)

    def value(self, type_id: int, field: str) -> Any:
        if type_id in _NUMBERS:
            return self.number(*_NUMBERS[type_id], field)
        if type_id == _STRING:
            return self.string(field)
        if type_id == _ARRAY:
            return self.array(field, 0)
        start = self.position
        byte = self.number("B", 1, field)
        if byte > 1:
            self.fail(field, f"a boolean is {byte}, not 0 or 1", start)
        return bool(byte)

    def array(self, field: str, depth: int) -> Any:
        start = self.position
        element = self.u32(f"{field} element type")
        if element not in LEAST_BYTES:
            self.fail(f"{field} element type", f"{element} is not a GGUF value type", start)
        count = self.u64(f"{field} count")
        if count > (self.size - self.position) // LEAST_BYTES[element]:
            left = self.size - self.position
            self.fail(f"{field} count", f"{count} elements do not fit in the remaining {left} bytes", start + 4)
        if element == _STRING:
            return GGUFArray(self, element, self._string_starts(count, field), field, depth)
        if element == _ARRAY:
            return GGUFArray(self, element, self._array_starts(count, field, depth, start), field, depth)
        if element == _BOOL:
            return self._bools(count, field)
        return self._numbers(element, count, field)

    def _bools(self, count: int, field: str) -> GGUFBools:
        start = self.take(count, field)
        values = self.buffer[start : self.position]
        if count and max(values) > 1:
            self.fail(field, "a boolean is not 0 or 1", start)
        return GGUFBools(values)

    def _numbers(self, element: int, count: int, field: str) -> array:
        code, size = _NUMBERS[element]
        start = self.take(count * size, field)
        values = array(code)
        with memoryview(self.buffer) as view, view[start : self.position] as part:
            values.frombytes(part)
        return values

    def _string_starts(self, count: int, field: str) -> array:
        """Positions of the strings. Written out flat: vocabularies have a quarter of a million of them."""
        starts = array("Q")
        buffer, size, position = self.buffer, self.size, self.position
        unpack_length = _LENGTH.unpack_from
        try:
            for _ in range(count):
                starts.append(position)
                (length,) = unpack_length(buffer, position)
                body = position + 8
                position = body + length
                if length > MAX_STRING_BYTES or position > size:
                    break
                str(buffer[body:position], "utf-8")
            else:
                self.position = position
                return starts
        except (struct.error, UnicodeDecodeError):
            pass
        # The slow path finds the same fault again and names it.
        self.position = starts[-1]
        self.string(f"{field}[{len(starts) - 1}]")
        raise AssertionError("unreachable: the fault is not there the second time")

    def _array_starts(self, count: int, field: str, depth: int, start: int) -> array:
        if depth + 1 >= MAX_NESTING:
            self.fail(field, f"arrays are nested more than {MAX_NESTING} deep", start)
        starts = array("Q")
        for index in range(count):
            starts.append(self.position)
            self.array(f"{field}[{index}]", depth + 1)
        return starts
