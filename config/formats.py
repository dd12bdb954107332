"""Weight formats: the GGML type numbers used in files, in C and in Python.

`block_len` elements of a row are stored in `block_bytes` bytes of a GGUF file.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """One storage format of a weight matrix, as GGUF files hold it."""

    type_id: int
    name: str
    block_len: int
    block_bytes: int

    def row_bytes(self, length: int) -> int:
        """Bytes of a row of `length` elements; `length` must be a multiple of `block_len`."""
        return length // self.block_len * self.block_bytes


F32 = Format(0, "F32", 1, 4)
F16 = Format(1, "F16", 1, 2)
Q4_0 = Format(2, "Q4_0", 32, 18)
Q4_1 = Format(3, "Q4_1", 32, 20)
Q5_0 = Format(6, "Q5_0", 32, 22)
Q5_1 = Format(7, "Q5_1", 32, 24)
Q8_0 = Format(8, "Q8_0", 32, 34)
Q4_K = Format(12, "Q4_K", 256, 144)
Q5_K = Format(13, "Q5_K", 256, 176)
Q6_K = Format(14, "Q6_K", 256, 210)
BF16 = Format(30, "BF16", 1, 2)

FORMATS: dict[int, Format] = {f.type_id: f for f in (F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, BF16)}
BY_NAME: dict[str, Format] = {f.name: f for f in FORMATS.values()}

# Rows of a packed matrix are grouped in panels of this many (native/isa: one register lane each).
PANEL_ROWS = 16
