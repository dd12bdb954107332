"""Writes small GGUF files for tests, valid or wrong on purpose, from the format's description.

file = GGUFBuilder(); file.add("general.architecture", "string", "llama"); file.tensor(...); file.save(path)
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from coremill.config.formats import BY_NAME, Format

NUMBERS = {
    "u8": (0, "B"),
    "i8": (1, "b"),
    "u16": (2, "H"),
    "i16": (3, "h"),
    "u32": (4, "I"),
    "i32": (5, "i"),
    "f32": (6, "f"),
    "bool": (7, "B"),
    "u64": (10, "Q"),
    "i64": (11, "q"),
    "f64": (12, "d"),
}
STRING, ARRAY = 8, 9


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def type_number(kind: str) -> int:
    if kind.startswith("["):
        return ARRAY
    return STRING if kind == "string" else NUMBERS[kind][0]


def value(kind: str, item: object) -> bytes:
    """Bytes of a value; kind "[u32]" is an array, "[[u32]]" an array of arrays."""
    if kind.startswith("["):
        element = kind[1:-1]
        return struct.pack("<IQ", type_number(element), len(item)) + b"".join(value(element, each) for each in item)
    if kind == "string":
        return string(item)
    return struct.pack("<" + NUMBERS[kind][1], item)


class GGUFBuilder:
    """Keys and tensors in the order given."""

    def __init__(self, version: int = 3, alignment: int = 32) -> None:
        self.version, self.alignment = version, alignment
        self.raw_keys: list[bytes] = []
        self.tensors: list[tuple[str, tuple[int, ...], int, bytes]] = []
        if alignment != 32:
            self.add("general.alignment", "u32", alignment)

    def add(self, key: str | bytes, kind: str, item: object) -> None:
        self.raw_keys.append(string(key) + struct.pack("<I", type_number(kind)) + value(kind, item))

    def tensor(self, name: str, shape: tuple[int, ...], fmt: Format | int, data: bytes | np.ndarray) -> None:
        """`shape` in ggml order, innermost first."""
        type_id = fmt if isinstance(fmt, int) else fmt.type_id
        self.tensors.append((name, shape, type_id, bytes(data)))

    def build(self, offsets: list[int] | None = None) -> bytes:
        """The file's bytes; `offsets` replaces those of the tensors."""
        infos, position = b"", 0
        for i, (name, shape, type_id, data) in enumerate(self.tensors):
            offset = position if offsets is None else offsets[i]
            infos += string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
            infos += struct.pack("<IQ", type_id, offset)
            position += -(-len(data) // self.alignment) * self.alignment
        head = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.raw_keys))
        head += b"".join(self.raw_keys) + infos
        head += bytes(-len(head) % self.alignment)
        body = b"".join(data + bytes(-len(data) % self.alignment) for *_, data in self.tensors)
        return head + body

    def save(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path


def random_tensor(rng: np.random.Generator, fmt: Format, rows: int, k: int, *, extreme: bool = False) -> bytes:
    """Rows of any bit pattern (`extreme`: infinities, NaNs, subnormal scales), else of moderate finite values."""
    if extreme:
        return rng.integers(0, 256, rows * fmt.row_bytes(k), dtype=np.uint8).tobytes()
    if fmt.block_len == 1:
        values = rng.normal(0, 0.05, rows * k).astype(np.float32)
        if fmt.name == "F32":
            return values.tobytes()
        if fmt.name == "F16":
            return values.astype(np.float16).tobytes()
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    blocks = rng.integers(0, 256, (rows * k // fmt.block_len, fmt.block_bytes), dtype=np.uint8)
    scales = {"Q6_K": [208]}.get(fmt.name, [0, 2] if fmt.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0])
    for at in scales:
        blocks[:, at : at + 2] = rng.normal(0, 0.01, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.tobytes()


def byte_level_tokens(vocab: int) -> tuple[list[str], list[int]]:
    """A GPT-2 style vocabulary: three control tokens, the 256 bytes, then pairs of letters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [chr(b) for b in printable] + [chr(0x100 + i) for i in range(len(rest))]
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens += [a + b for a in letters for b in letters]
    return tokens[:vocab], [3, 3, 3] + [1] * (vocab - 3)


def tiny_llama(
    rng: np.random.Generator,
    formats: str | dict[str, str] = "Q8_0",
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 96,
    vocab: int = 300,
    tied: bool = True,
    biases: bool = False,
    extreme: bool = False,
    rope_factors: bool = False,
    version: int = 3,
) -> GGUFBuilder:
    """A random llama model. `formats` names one format, or maps tensor name endings to formats ("" is the rest)."""
    file = GGUFBuilder(version)
    head_dim = hidden // heads
    file.add("general.architecture", "string", "llama")
    file.add("general.name", "string", "Tiny")
    file.add("general.license", "string", "apache-2.0")
    keys = {"block_count": layers, "context_length": 512, "embedding_length": hidden, "feed_forward_length": ffn}
    keys |= {"attention.head_count": heads, "attention.head_count_kv": kv_heads, "rope.dimension_count": head_dim}
    for key, number in keys.items():
        file.add(f"llama.{key}", "u32", number)
    file.add("llama.attention.layer_norm_rms_epsilon", "f32", 1e-5)
    file.add("llama.rope.freq_base", "f32", 10000.0)
    tokens, types = byte_level_tokens(vocab)
    file.add("tokenizer.ggml.model", "string", "gpt2")
    file.add("tokenizer.ggml.pre", "string", "smollm")
    file.add("tokenizer.ggml.tokens", "[string]", tokens)
    file.add("tokenizer.ggml.token_type", "[i32]", types)
    file.add("tokenizer.ggml.merges", "[string]", [f"{t[0]} {t[1]}" for t in tokens[259:]] or ["a b"])
    file.add("tokenizer.ggml.bos_token_id", "u32", 1)
    file.add("tokenizer.ggml.eos_token_id", "u32", 2)
    file.add("tokenizer.chat_template", "string", "{{ messages[0]['content'] }}")

    def matrix(name: str, rows: int, k: int) -> None:
        if isinstance(formats, str):
            fmt = BY_NAME[formats]
        else:
            fmt = BY_NAME[next(formats[end] for end in sorted(formats, key=len, reverse=True) if name.endswith(end))]
        file.tensor(f"{name}.weight", (k, rows), fmt, random_tensor(rng, fmt, rows, k, extreme=extreme))
        if biases and name.startswith("blk."):
            vector(f"{name}.bias", rows)

    def vector(name: str, length: int) -> None:
        file.tensor(name, (length,), 0, rng.normal(1, 0.1, length).astype(np.float32).tobytes())

    matrix("token_embd", vocab, hidden)
    for layer in range(layers):
        blk = f"blk.{layer}"
        vector(f"{blk}.attn_norm.weight", hidden)
        matrix(f"{blk}.attn_q", hidden, hidden)
        matrix(f"{blk}.attn_k", kv_heads * head_dim, hidden)
        matrix(f"{blk}.attn_v", kv_heads * head_dim, hidden)
        matrix(f"{blk}.attn_output", hidden, hidden)
        vector(f"{blk}.ffn_norm.weight", hidden)
        matrix(f"{blk}.ffn_gate", ffn, hidden)
        matrix(f"{blk}.ffn_up", ffn, hidden)
        matrix(f"{blk}.ffn_down", hidden, ffn)
    vector("output_norm.weight", hidden)
    if not tied:
        matrix("output", vocab, hidden)
    if rope_factors:
        vector("rope_freqs.weight", head_dim // 2)
    return file
