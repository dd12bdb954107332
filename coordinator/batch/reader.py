"""Cuts an input into lines: one row each, never more than one line in memory.

Which format a file has is decided once, before its first row:

    --format jsonl | text    as said
    .jsonl .ndjson .json     JSONL, whatever is inside: a bad line is an error row
    .txt .text               text: each line is a prompt, taken as it is
    .csv .tsv .parquet       refused: converting them is for their owner to decide
    anything else, or stdin  by the first line that is not blank: JSONL when it starts with "{", else text

A first line that begins a JSON array or looks like the head of a CSV table is refused where it decides.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from coremill.config.errors import RequestError, RunError
from coremill.coordinator.batch.source import Source

MAX_LINE_BYTES = 64 << 20
DIGEST_BYTES = 7  # beside one byte of flags in the table of rows

Format = Literal["jsonl", "text"]
_FORMAT_OF_SUFFIX: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".txt": "text", ".text": "text",
}  # fmt: skip
_TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")
# Not every bracket: prompts may begin with [INST].
_ARRAY_HEAD = re.compile(rb'\[\s*(?:[{"\[]|$)')
# Two or more names, nothing else: no prompt that anybody means.
_CSV_HEAD = re.compile(rb'"?\w+"?(?:,"?\w+"?)+')
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line that is not blank. number: 1 for the first line of the file, blank ones counted. data: without its
    end and, in JSONL, without space around it; b"" when error says it was too long. digest: of the content."""

    number: int
    data: bytes
    digest: bytes
    error: RequestError | None = None


class LineReader:
    """Iterates over the rows of a source. `format` and `why` are known from the start."""

    def __init__(
        self, source: Source, asked: Literal["auto", "jsonl", "text"] = "auto", *, limit: int = MAX_LINE_BYTES
    ):
        self._source = source
        self._limit = limit
        self.num_lines = 0
        self._consumed = 0
        self._held = self._first_lines()
        self.format, self.why = self._decide(asked)

    def __iter__(self) -> Iterator[RawLine]:
        while self._held:
            yield from self._row(self._held.pop(0))
        while line := self._next_line():
            yield from self._row(line)

    def position(self) -> tuple[int, int] | None:
        """(bytes of the file behind us, bytes in all); None for a pipe. Compressed files are read ahead a little."""
        size = self._source.size
        if not size:
            return None
        return (self._source.position() if self._source.compressed else self._consumed), size

    def _first_lines(self) -> list[tuple[int, bytes, int]]:
        """Reads up to the first line that is not blank: it decides the format when the name does not."""
        line = self._next_line()
        while line and not line[1].strip():
            line = self._next_line()
        return [line] if line else []

    def _decide(self, asked: str) -> tuple[Format, str]:
        suffix = self._source.suffix
        if asked != "auto":
            return asked, "as --format says"  # type: ignore[return-value]
        if suffix in _TABLE_SUFFIXES:
            raise self._not_rows(f"ends in {suffix}")
        by_name = _FORMAT_OF_SUFFIX.get(suffix)
        first = self._held[0][1].lstrip() if self._held else b""
        if by_name is None or suffix == ".json":
            if _ARRAY_HEAD.match(first):
                raise self._not_rows("begins like a JSON array")
            if by_name is None and _CSV_HEAD.fullmatch(first.rstrip()):
                raise self._not_rows("begins like the head of a CSV table")
        if by_name is not None:
            return by_name, f"the name ends in {suffix}"
        if not self._held:
            return "jsonl", "it is empty"
        starts = first.startswith(b"{")
        return ("jsonl", "its first line starts with {") if starts else ("text", "its first line does not start with {")

    def _not_rows(self, why: str) -> RunError:
        return RunError(
            f"{self._source.name} {why}: coremill wants one JSON object a line, or one prompt a line of plain text "
            "(--format text takes every line as a prompt, whatever it looks like)"
        )

    def _next_line(self) -> tuple[int, bytes, int] | None:
        """(number, content without its end, bytes beyond the limit). The excess itself is read and dropped."""
        stream, limit = self._source.stream, self._limit
        try:
            line = stream.readline(limit + 2)  # room for CR LF after a line of just the limit
            if not line.endswith(b"\n"):
                self._source.check_length()
            if not line:
                return None
            self._consumed += len(line)
            if not self.num_lines:
                line = self._without_bom(line)
            excess = 0
            if len(line) == limit + 2 and not line.endswith(b"\n"):
                excess = len(line) - limit
                while piece := stream.readline(1 << 20):
                    excess += len(piece)
                    self._consumed += len(piece)
                    if piece.endswith(b"\n"):
                        break
            # A CR before the LF belongs to the line's end.
            content = line[:-1] if line.endswith(b"\n") else line
            content = content[:-1] if content.endswith(b"\r") else content
            self.num_lines += 1
            return self.num_lines, content, max(excess, len(content) - limit)
        except (EOFError, OSError) as error:
            raise RunError(f"{self._source.name}: reading failed after line {self.num_lines}: {error}") from error

    def _without_bom(self, line: bytes) -> bytes:
        if line.startswith(_UTF16_BOMS):
            raise RunError(f"{self._source.name} is UTF-16: convert it to UTF-8 first")
        return line.removeprefix(_UTF8_BOM)

    def _row(self, line: tuple[int, bytes, int]) -> Iterator[RawLine]:
        number, content, excess = line
        if excess > 0:
            size = self._limit + excess
            problem = f"the line has about {size} bytes: the limit is {self._limit}"
            # The size stands for the content: a line this long was not kept, nor will it ever have run.
            yield RawLine(number, b"", _digest(b"%d" % size), RequestError("line_too_long", problem))
            return
        stripped = content.strip()
        if stripped:
            data = stripped if self.format == "jsonl" else content
            yield RawLine(number, data, _digest(data))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=b"coremill.line").digest()
