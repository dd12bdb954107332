"""The free blocks of the KV arena. Every other block is in the table of exactly one lease: free + owned = all.

Workers know only the blocks of their own sequences, and only the coordinator says whose a block is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class BlockPool:
    """Hands out block ids, lowest first: an arena that is never full then touches little memory."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._is_free = bytearray(b"\1") * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` blocks; the caller has looked at num_free."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} are free")
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for block in taken:
            self._is_free[block] = 0
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """Blocks no process will touch again. A block given back twice is a bug worth stopping for."""
        for block in blocks:
            if self._is_free[block]:
                raise ValueError(f"block {block} is free already")
            self._is_free[block] = 1
            heapq.heappush(self._free, block)

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """AssertionError unless free blocks and `tables` together hold every block exactly once."""
        seen = sorted([*self._free, *(block for table in tables for block in table)])
        assert seen == list(range(self.num_blocks)), f"{len(seen)} blocks in the books, {self.num_blocks} exist"
