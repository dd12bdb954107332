"""Rows on their way through the text service: submitted as batches, sent as chunks, which small batches share."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from coremill.config.errors import RequestError
from coremill.coordinator.text import wire
from coremill.coordinator.text.requests import TextRequest

_CHUNK_ROWS = 32
_CHUNK_BYTES = 1 << 17


class Batch:
    """Rows submitted together, and where their answers go."""

    def __init__(self, size: int) -> None:
        self.results: list[Any] = [None] * size
        self.missing = size
        self.future: Future[list[Any]] = Future()
        self.future.set_running_or_notify_cancel()
        if not size:
            self.future.set_result([])

    def answer(self, row: int, result: Any) -> None:
        self.results[row] = result
        self.missing -= 1
        if not self.missing:
            self.future.set_result(self.results)


class ChunkRow(NamedTuple):
    """A packed row, and where in which batch its answer goes."""

    batch: Batch
    position: int
    data: bytes


class Chunk:
    """Rows that travel together. alone: one row that shares its way with nobody, as the helper may die of it."""

    __slots__ = ("alone", "kills", "kind", "num_bytes", "number", "rows")

    def __init__(self, kind: wire.Kind, rows: list[ChunkRow], alone: bool = False) -> None:
        self.kind, self.rows, self.alone = kind, rows, alone
        self.num_bytes = sum(len(row.data) for row in rows)
        self.number = 0
        self.kills = 0

    def singles(self) -> list[Chunk]:
        return [Chunk(self.kind, [row], alone=True) for row in self.rows]

    def absorb(self, other: Chunk) -> bool:
        """Take the rows of the chunk behind this one along, if all of them may travel together."""
        if self.alone or other.alone or other.kind != self.kind:
            return False
        if len(self.rows) + len(other.rows) > _CHUNK_ROWS or self.num_bytes + other.num_bytes > _CHUNK_BYTES:
            return False
        self.rows += other.rows
        self.num_bytes += other.num_bytes
        return True


def make_chunks(requests: Sequence[TextRequest], kind: wire.Kind) -> tuple[Batch, list[Chunk]]:
    """Pack requests for the helper. A request that cannot be sent has its answer already."""
    batch, chunks = Batch(len(requests)), []
    rows: list[ChunkRow] = []
    num_bytes = 0
    for position, request in enumerate(requests):
        try:
            data = wire.pack_row(request)
        except RequestError as error:
            batch.answer(position, error)
            continue
        if rows and (len(rows) == _CHUNK_ROWS or num_bytes + len(data) > _CHUNK_BYTES):
            chunks.append(Chunk(kind, rows))
            rows, num_bytes = [], 0
        rows.append(ChunkRow(batch, position, data))
        num_bytes += len(data)
    if rows:
        chunks.append(Chunk(kind, rows))
    return batch, chunks
