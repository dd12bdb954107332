"""The blocks of the KV arena that nobody has, and those that somebody still reads. Who has the others is written in
coordinator/tables.py.

Workers know only the blocks of their own sequences, and only the coordinator says whose a block is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class BlockPool:
    """Hands out block ids, lowest first: an arena that is never full then touches little memory.

    A pinned block is being copied by a worker. Given back meanwhile, it lingers until it is unpinned.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_touched = 0  # blocks ever handed out: those below this number
        self._free = list(range(num_blocks))
        self._is_free = bytearray(b"\1") * num_blocks
        self._pins: dict[int, int] = {}
        self._lingering: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    @property
    def has_touched(self) -> bool:
        """Whether a free block has been handed out before, so that its memory is there already."""
        return bool(self._free) and self._free[0] < self.num_touched

    def take(self, count: int) -> list[int]:
        """`count` blocks; the caller has looked at num_free."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} are free")
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for block in taken:
            self._is_free[block] = 0
        self.num_touched = max(self.num_touched, taken[-1] + 1) if taken else self.num_touched
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """Blocks no process will write to again. A block given back twice is a bug worth stopping for."""
        for block in blocks:
            if self._is_free[block] or block in self._lingering:
                raise ValueError(f"block {block} is free already")
            if block in self._pins:
                self._lingering.add(block)
                continue
            self._is_free[block] = 1
            heapq.heappush(self._free, block)

    def pin(self, block: int) -> None:
        """Somebody will read it until `unpin`."""
        self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, block: int) -> None:
        self._pins[block] -= 1
        if not self._pins[block]:
            del self._pins[block]
            if block in self._lingering:
                self._lingering.remove(block)
                self.give_back((block,))

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """AssertionError unless free and lingering blocks and `tables` together hold every block exactly once."""
        seen = sorted([*self._free, *self._lingering, *(block for table in tables for block in table)])
        assert seen == list(range(self.num_blocks)), f"{len(seen)} blocks in the books, {self.num_blocks} exist"
        assert self._lingering <= self._pins.keys(), "a block lingers for nobody"
