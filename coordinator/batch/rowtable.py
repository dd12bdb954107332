"""What a run remembers of every row: 24 bytes in an open-addressed table, at most 48 with its gaps.

    slot: three uint64   key, low half | key, high half | digest of the line (56 bits) and flags (8 bits)

A Python dict of the same would take some 200 bytes a row. The table is cut into segments that grow one by one,
so that growing neither doubles the memory for a moment nor stops the run.
"""

from __future__ import annotations

import hashlib
from array import array
from struct import Struct

KEY_BYTES = 16

SEEN = 1  # the row has been read from the input by this run
IN_RESULTS = 2  # its line is in OUT
IN_ERRORS = 4  # its line is in the error file
USED = 128  # the slot is taken

_NUM_SEGMENTS = 256
# Room for some 13,000 rows in 400 kB, so that files of usual size make no table grow, which scatters memory.
_FIRST_SLOTS = 64
_MAX_LOAD = 0.8
_GROWTH = 1.5
_KEY = Struct("<QQ")
UNKNOWN_DIGEST = bytes(7)


def row_key(custom_id: str) -> bytes:
    """Identity of a row: the same in every run, wherever in the file it stands."""
    return hashlib.blake2b(custom_id.encode(), digest_size=KEY_BYTES, person=b"coremill.row").digest()


def line_key(line_number: int) -> bytes:
    """Identity of a row that has no custom_id to itself (another row came first)."""
    return hashlib.blake2b(b"%d" % line_number, digest_size=KEY_BYTES, person=b"coremill.line").digest()


class RowTable:
    """Maps keys of 16 bytes to (digest of 7 bytes, flags)."""

    def __init__(self) -> None:
        self._segments: list[array[int] | None] = [None] * _NUM_SEGMENTS
        self._used = [0] * _NUM_SEGMENTS

    def __len__(self) -> int:
        return sum(self._used)

    @property
    def num_bytes(self) -> int:
        return sum(8 * len(segment) for segment in self._segments if segment is not None)

    def get(self, key: bytes) -> tuple[bytes, int]:
        """(digest, flags) of a row; flags are 0 for a row never put."""
        low, high = _KEY.unpack(key)
        segment = self._segments[low % _NUM_SEGMENTS]
        if segment is None:
            return UNKNOWN_DIGEST, 0
        value = segment[_find(segment, low, high) + 2]
        return (value >> 8).to_bytes(7, "little"), value & 0xFF & ~USED

    def put(self, key: bytes, digest: bytes, flags: int) -> None:
        low, high = _KEY.unpack(key)
        index = low % _NUM_SEGMENTS
        segment = self._segments[index]
        if segment is None or self._used[index] + 1 > _MAX_LOAD * (len(segment) // 3):
            segment = self._grow(index)
        at = _find(segment, low, high)
        if not segment[at + 2]:
            self._used[index] += 1
            segment[at], segment[at + 1] = low, high
        segment[at + 2] = int.from_bytes(digest, "little") << 8 | flags | USED

    def count(self, flags: int, without: int = 0) -> int:
        """Rows that have all of `flags` and none of `without`."""
        mask, wanted = flags | without | USED, flags | USED
        values = (value for segment in self._segments if segment is not None for value in segment[2::3])
        return sum(value & mask == wanted for value in values)

    def clear_flag(self, flag: int) -> None:
        """Take a flag from every row."""
        for segment in self._segments:
            if segment is not None:
                for at in range(2, len(segment), 3):
                    segment[at] &= ~flag & (2**64 - 1)

    def _grow(self, index: int) -> array[int]:
        old = self._segments[index]
        num_slots = _FIRST_SLOTS if old is None else int(len(old) // 3 * _GROWTH) + 1
        new = array("Q", bytes(24 * num_slots))
        if old is not None:
            for at in range(0, len(old), 3):
                if old[at + 2]:
                    to = _find(new, old[at], old[at + 1])
                    new[to : to + 3] = old[at : at + 3]
        self._segments[index] = new
        return new


def _find(segment: array[int], low: int, high: int) -> int:
    """Index of the key's slot, or of the free slot where it belongs. A free slot always exists."""
    at = 3 * ((low // _NUM_SEGMENTS) % (len(segment) // 3))
    while segment[at + 2] and (segment[at] != low or segment[at + 1] != high):
        at += 3
        if at == len(segment):
            at = 0
    return at
