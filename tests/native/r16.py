"""An independent numpy writer of the packed "R16" layout, and guarded memory: helpers of the kernel tests.

Written from the layout's description and not from native/src/pack.c, so that the two can be compared.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from coremill.config.formats import FORMATS, Format

ROWS = 16
PANEL = np.dtype([("offset", "<u8"), ("format", "<u4"), ("reserved", "<u4")])
FLOATS = (0, 1, 30)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(shape, dtype, fill=None) -> np.ndarray:
    """An array right before an unreadable page, so that reading or writing past its end crashes."""
    dtype, page = np.dtype(dtype), mmap.PAGESIZE
    size = int(np.prod(shape)) * dtype.itemsize
    inner = -(-max(size, 1) // page) * page
    area = mmap.mmap(-1, inner + 2 * page)  # lives as long as the array, which refers to it
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for start in (address, address + page + inner):
        if _libc.mprotect(start, page, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    array = np.frombuffer(area, dtype, size // dtype.itemsize, page + inner - size).reshape(shape)
    if fill is not None:
        array[...] = fill
    return array


def random_rows(rng: np.random.Generator, fmt: Format, rows: int, k: int) -> np.ndarray:
    """Random rows as a GGUF tensor stores them, uint8 [rows][bytes]: every code occurs, scales are moderate."""
    if fmt.type_id in FLOATS:
        values = rng.standard_normal((rows, k)).astype(np.float32)
        if fmt.name == "F32":
            return values.view(np.uint8)
        if fmt.name == "F16":
            return values.astype(np.float16).view(np.uint8)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    blocks = rng.integers(0, 256, (rows, k // fmt.block_len, fmt.block_bytes), dtype=np.uint8)
    for at in {"Q6_K": (208,)}.get(fmt.name, (0, 2) if fmt.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)):
        scale = rng.standard_normal(blocks.shape[:2]) * 0.01
        scale[rng.random(scale.shape) < 0.05] *= 1e-5  # subnormal halves
        blocks[..., at : at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def _nibbles(qs: np.ndarray) -> np.ndarray:
    return np.concatenate([qs & 15, qs >> 4], axis=-1)


def _k_scales(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 six-bit scales and minima in 12 bytes of a Q4_K or Q5_K block."""
    a, b, c = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    scale = np.concatenate([a & 63, (c & 15) | (a >> 6) << 4], axis=-1)
    minimum = np.concatenate([b & 63, (c >> 4) | (b >> 6) << 4], axis=-1)
    return scale, minimum


def _split(fmt: Format, raw: np.ndarray, k: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Codes uint8 [rows][k], and the pieces of the scales plane in order, each uint8 [rows][blocks][...][bytes]."""
    rows = len(raw)
    block = raw.reshape(rows, k // fmt.block_len, fmt.block_bytes)
    d, m = block[..., None, 0:2], block[..., None, 2:4]
    name = fmt.name
    if name in ("Q4_0", "Q4_1"):
        codes, scales = _nibbles(block[..., -16:]), [d] if name == "Q4_0" else [d, m]
    elif name in ("Q5_0", "Q5_1"):
        high = np.unpackbits(block[..., -20:-16], axis=-1, bitorder="little")
        codes, scales = _nibbles(block[..., -16:]) | high << 4, [d] if name == "Q5_0" else [d, m]
    elif name == "Q8_0":
        codes, scales = block[..., 2:] ^ 0x80, [d]
    elif name in ("Q4_K", "Q5_K"):
        codes = _nibbles(block[..., -128:].reshape(rows, -1, 4, 32)).reshape(rows, -1, 8, 32)
        if name == "Q5_K":
            high = block[..., 16:48, None] >> np.arange(8, dtype=np.uint8) & 1
            codes = codes | np.moveaxis(high, -1, -2) << 4
        scale, minimum = _k_scales(block[..., 4:16])
        scales = [d, m, scale[..., None], minimum[..., None]]
    else:
        low = _nibbles(block[..., :128].reshape(rows, -1, 2, 64)).reshape(rows, -1, 2, 4, 32)
        high = block[..., 128:192].reshape(rows, -1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
        codes, scales = low | high << 4, [block[..., None, 208:210], block[..., 192:208, None]]
    return codes.reshape(rows, k), scales


def _code_lines(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of 16 rows, uint8 [16][k] -> [k/32][lines][64]."""
    groups = codes.reshape(ROWS, -1, 8, 4).transpose(1, 2, 0, 3).reshape(-1, 8, 64)  # [block][group][row, i]
    if bits == 8:
        return groups
    lines = [(groups[:, :4] & 15) | (groups[:, 4:] & 15) << 4]
    if bits == 5:
        lines.append(np.bitwise_or.reduce((groups >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)[:, None])
    if bits == 6:
        pairs = (groups >> 4).reshape(-1, 2, 4, 64) << (2 * np.arange(4, dtype=np.uint8))[:, None]
        lines.append(np.bitwise_or.reduce(pairs, axis=2))
    return np.concatenate(lines, axis=1)


def _fill_up(rows: np.ndarray) -> np.ndarray:
    """Zero bytes for the rows that a last panel lacks."""
    return np.concatenate([rows, np.zeros((ROWS - len(rows), *rows.shape[1:]), np.uint8)])


def pack_panel(fmt: Format, raw: np.ndarray, k: int) -> bytes:
    """One panel from at most 16 rows of a GGUF tensor."""
    if fmt.type_id in FLOATS:
        data = _fill_up(raw).reshape(ROWS, k, fmt.block_bytes).transpose(1, 0, 2).tobytes()
    else:
        codes, scales = _split(fmt, raw, k)
        bits = {"Q8": 8, "Q6": 6, "Q5": 5, "Q4": 4}[fmt.name[:2]]
        planes = [_fill_up(s).transpose(1, 2, 0, 3).reshape(s.shape[1], -1) for s in scales]  # [block][piece, row]
        data = _code_lines(_fill_up(codes), bits).tobytes() + np.concatenate(planes, axis=1).tobytes()
    return data + bytes(-len(data) % 64)


def pack_matrix(formats: list[int], rows: list[np.ndarray], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Panels one after another in guarded memory, and their table."""
    table = guarded(len(formats), PANEL, 0)
    panels, at = [], 0
    for i, (type_id, raw) in enumerate(zip(formats, rows, strict=True)):
        panels.append(pack_panel(FORMATS[type_id], raw, k))
        table[i] = (at, type_id, 0)
        at += len(panels[-1])
    base = guarded(at, np.uint8)
    base[:] = np.frombuffer(b"".join(panels), np.uint8)
    return base, table
