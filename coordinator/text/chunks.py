"""Rows on their way through the text service: submitted as batches, sent as chunks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

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


class Chunk:
    """Rows that travel together: (position in the batch, packed row)."""

    __slots__ = ("batch", "kills", "kind", "num_bytes", "number", "rows")

    def __init__(self, batch: Batch, kind: wire.Kind, rows: list[tuple[int, bytes]]) -> None:
        self.batch, self.kind, self.rows = batch, kind, rows
        self.num_bytes = sum(len(data) for _, data in rows)
        self.number = 0
        self.kills = 0

    def singles(self) -> list[Chunk]:
        return [Chunk(self.batch, self.kind, [row]) for row in self.rows]


def make_chunks(requests: Sequence[TextRequest], kind: wire.Kind) -> tuple[Batch, list[Chunk]]:
    """Pack requests for the helper. A request that cannot be sent has its answer already."""
    batch, chunks = Batch(len(requests)), []
    rows: list[tuple[int, bytes]] = []
    num_bytes = 0
    for position, request in enumerate(requests):
        try:
            data = wire.pack_row(request)
        except RequestError as error:
            batch.answer(position, error)
            continue
        if rows and (len(rows) == _CHUNK_ROWS or num_bytes + len(data) > _CHUNK_BYTES):
            chunks.append(Chunk(batch, kind, rows))
            rows, num_bytes = [], 0
        rows.append((position, data))
        num_bytes += len(data)
    if rows:
        chunks.append(Chunk(batch, kind, rows))
    return batch, chunks
