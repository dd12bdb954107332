"""`coremill bench shape NAME`: real sizes without real weights.

A GGUF file of a known model's shape, of the `llama` architecture, with random bits of valid scales: what a step costs
depends on sizes and formats, not on values. Qwen's biases are there; its rotary pairing is not, which costs the same.
The tokens are bytes and fillers, so that every command can run the file; what comes out means nothing.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from coremill.config.errors import ConfigError
from coremill.config.formats import BY_NAME, F32, Format
from coremill.config.options import nearest
from coremill.config.settings import Settings
from coremill.config.tokens import byte_alphabet

_ALIGNMENT = 32
# GGUF's numbers for types of values.
_U32, _I32, _F32, _STRING, _ARRAY = 4, 5, 6, 8, 9
# Blocks are made once and written over and over; not a multiple of a row, so that rows differ.
_POOL_BYTES = 8 << 20
# Standard deviation of the weights: activations stay in the range of real models'.
_SPREAD = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder, in elements, as its authors published them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    context: int
    rope_base: float
    tied: bool
    head_dim: int
    biases: bool = False
    rope_factors: bool = False


SHAPES: dict[str, Shape] = {
    "llama-3.2-1b": Shape(16, 2048, 32, 8, 8192, 128256, 131072, 5e5, True, 64, rope_factors=True),
    "qwen2.5-1.5b": Shape(28, 1536, 12, 2, 8960, 151936, 32768, 1e6, True, 128, biases=True),
    "llama-3.1-8b": Shape(32, 4096, 32, 8, 14336, 128256, 131072, 5e5, False, 128, rope_factors=True),
}  # fmt: skip


def tensors(shape: Shape, weights: Format) -> Iterator[tuple[str, tuple[int, ...], Format]]:
    """(name, shape with the innermost length first, format) of each tensor, in file order."""

    def matrix(name: str, rows: int, k: int, biased: bool = False) -> Iterator[tuple[str, tuple[int, ...], Format]]:
        yield f"{name}.weight", (k, rows), weights
        if biased:
            yield f"{name}.bias", (rows,), F32

    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield from matrix("token_embd", shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        blk = f"blk.{layer}"
        yield f"{blk}.attn_norm.weight", (shape.hidden,), F32
        yield from matrix(f"{blk}.attn_q", heads, shape.hidden, shape.biases)
        yield from matrix(f"{blk}.attn_k", kv_heads, shape.hidden, shape.biases)
        yield from matrix(f"{blk}.attn_v", kv_heads, shape.hidden, shape.biases)
        yield from matrix(f"{blk}.attn_output", shape.hidden, heads)
        yield f"{blk}.ffn_norm.weight", (shape.hidden,), F32
        yield from matrix(f"{blk}.ffn_gate", shape.ffn, shape.hidden)
        yield from matrix(f"{blk}.ffn_up", shape.ffn, shape.hidden)
        yield from matrix(f"{blk}.ffn_down", shape.hidden, shape.ffn)
    yield "output_norm.weight", (shape.hidden,), F32
    if not shape.tied:
        yield from matrix("output", shape.vocab, shape.hidden)
    if shape.rope_factors:
        yield "rope_freqs.weight", (shape.head_dim // 2,), F32


def write_shape(name: str, settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """Only the file, where --output says; {"file", "bytes", "seconds"}."""
    path, (shape, weights) = Path(settings["output"]), _chosen(name, settings)
    if path.exists():
        raise ConfigError(f"--output {path}: there is such a file already")
    _check_room(path.parent, shape, weights, 1)
    begin = time.perf_counter()
    length = write_gguf(path, name, shape, weights)
    seconds = time.perf_counter() - begin
    say(f"{path}: {name} in {weights.name}, {length / 1e9:.2f} GB, random weights, written in {seconds:.1f} s")
    return {"file": str(path), "bytes": length, "seconds": seconds}


def bench_shape(name: str, settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """The table of `coremill bench` for a shape, and how long packing took. Nothing stays on the disk."""
    from coremill.native.cache import cache_folder, ensure_folder, ensure_pack
    from coremill.tools.bench.table import bench

    shape, weights = _chosen(name, settings)
    root = ensure_folder(cache_folder())
    _check_room(root, shape, weights, 2)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=root) as folder:
        source = Path(folder, f"{name}.{weights.name}.gguf")
        say(f"writing {name} in {weights.name} ...")
        length = write_gguf(source, name, shape, weights)
        say(f"packing {length / 1e9:.2f} GB ...")
        begin = time.perf_counter()
        pack = ensure_pack(source, cache_dir=folder)
        seconds = time.perf_counter() - begin
        source.unlink()
        report = bench(settings, say, str(pack))
    report["model"]["file"] = name
    report["packing"] = {"bytes": length, "seconds": round(seconds, 2), "gb_per_s": round(1e-9 * length / seconds, 2)}
    return report


def _chosen(name: str, settings: Settings) -> tuple[Shape, Format]:
    if name not in SHAPES:
        raise ConfigError(f"shape {name!r} is not known{nearest(name, SHAPES)}; known: {', '.join(SHAPES)}")
    weights = BY_NAME[settings["weights"].upper()]
    shape = SHAPES[name]
    for tensor, dims, form in tensors(shape, weights):
        if dims[0] % form.block_len:
            problem = f"{tensor} has rows of {dims[0]}, which are no multiple of {form.block_len}"
            raise ConfigError(f"--weights is {settings['weights']}: {problem}")
    return shape, weights


def _check_room(folder: Path, shape: Shape, weights: Format, copies: int) -> None:
    need = copies * sum(num_bytes(dims, form) for _, dims, form in tensors(shape, weights))
    free = shutil.disk_usage(folder).free
    if need > free:
        raise ConfigError(f"{folder}: {need / 1e9:.1f} GB are needed there, {free / 1e9:.1f} GB are free")


def num_bytes(dims: tuple[int, ...], form: Format) -> int:
    rows = dims[1] if len(dims) > 1 else 1
    return rows * form.row_bytes(dims[0])


def write_gguf(path: Path, name: str, shape: Shape, weights: Format) -> int:
    """Writes the file; its length in bytes."""
    listed = list(tensors(shape, weights))
    with open(path, "wb") as file:
        file.write(_head(name, shape, weights, listed))
        pool = _blocks(weights)
        place = 0
        for tensor, dims, form in listed:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            if form is weights and len(dims) == 2:
                place = _write_around(file, pool, place, num_bytes(dims, form))
            else:
                value = 0.0 if tensor.endswith(".bias") else 1.0
                file.write(np.full(dims[0], value, np.float32).tobytes())
        return file.tell()


def _write_around(file: BinaryIO, pool: memoryview, place: int, count: int) -> int:
    """Writes `count` bytes of the pool from `place` on, round and round; where the next ones begin."""
    while count:
        piece = pool[place : place + count]
        file.write(piece)
        count -= len(piece)
        place = (place + len(piece)) % len(pool)
    return place


def _blocks(form: Format) -> memoryview:
    """Random blocks whose weights have mean 0 and about _SPREAD. The offset of formats that have one is half of the
    range of their codes."""
    rng = np.random.default_rng(1)
    if form.block_len == 1:
        values = rng.normal(0, _SPREAD, _POOL_BYTES // form.block_bytes).astype(np.float32)
        made = {"F32": values, "F16": values.astype(np.float16), "BF16": (values.view(np.uint32) >> 16).astype("<u2")}
        return memoryview(made[form.name].tobytes())
    blocks = rng.integers(0, 256, (_POOL_BYTES // form.block_bytes, form.block_bytes), dtype=np.uint8)
    for at, value in _SCALES[form.name]:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(value * _SPREAD).tobytes(), np.uint8)
    return memoryview(blocks.tobytes())


# Where a block's f16 scales and offsets stand, and their values for weights of deviation 1: codes spread evenly over
# 2**bits values, K-quants times sub-scales of 0..63 or -128..127.
_SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_0": ((0, 1 / 4.6),),
    "Q4_1": ((0, 1 / 4.6), (2, -7.5 / 4.6)),
    "Q5_0": ((0, 1 / 9.2),),
    "Q5_1": ((0, 1 / 9.2), (2, -15.5 / 9.2)),
    "Q8_0": ((0, 1 / 74),),
    "Q4_K": ((0, 1 / 230), (2, 7.5 / 230)),
    "Q5_K": ((0, 1 / 460), (2, 15.5 / 460)),
    "Q6_K": ((208, 1 / 1370),),
}


# ---- what stands before the weights ----


def _head(name: str, shape: Shape, weights: Format, listed: list[tuple[str, tuple[int, ...], Format]]) -> bytes:
    keys = list(_keys(name, shape, weights))
    infos, offset = b"", 0
    for tensor, dims, form in listed:
        offset += -offset % _ALIGNMENT
        infos += _text(tensor) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, form.type_id, offset)
        offset += num_bytes(dims, form)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(keys)) + b"".join(keys) + infos
    return head + bytes(-len(head) % _ALIGNMENT)


def _keys(name: str, shape: Shape, weights: Format) -> Iterator[bytes]:
    """Each key with its value."""
    yield _key("general.architecture", _STRING, _text("llama"))
    yield _key("general.name", _STRING, _text(f"{name} {weights.name}, random weights"))
    for key, number in {
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.head_dim,
    }.items():
        yield _key(f"llama.{key}", _U32, struct.pack("<I", number))
    yield _key("llama.attention.layer_norm_rms_epsilon", _F32, struct.pack("<f", 1e-5))
    yield _key("llama.rope.freq_base", _F32, struct.pack("<f", shape.rope_base))
    tokens, kinds = vocabulary(shape.vocab)
    yield _key("tokenizer.ggml.model", _STRING, _text("gpt2"))
    yield _key("tokenizer.ggml.pre", _STRING, _text("llama-bpe"))
    yield _key("tokenizer.ggml.tokens", _ARRAY, _array(_STRING, len(tokens), b"".join(map(_text, tokens))))
    yield _key("tokenizer.ggml.token_type", _ARRAY, _array(_I32, len(kinds), struct.pack(f"<{len(kinds)}i", *kinds)))
    yield _key("tokenizer.ggml.merges", _ARRAY, _array(_STRING, 1, _text(f"{tokens[2]} {tokens[3]}")))
    for key in ("bos", "eos"):
        yield _key(f"tokenizer.ggml.{key}_token_id", _U32, struct.pack("<I", 0))
    yield _key("tokenizer.chat_template", _STRING, _text("{% for m in messages %}{{ m['content'] }}{% endfor %}"))


def vocabulary(size: int) -> tuple[list[str], list[int]]:
    """Token texts and types: one that ends generation, one that merges, the 256 bytes, words that no text has."""
    letters = list(byte_alphabet())
    tokens = ["<|end|>", letters[0] + letters[1], *letters]
    tokens += [f"{letters[32]}filler{number}" for number in range(size - len(tokens))]
    return tokens[:size], [3] + [1] * (size - 1)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _key(key: str, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _array(kind: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + values
