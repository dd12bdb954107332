"""Small random models, an independent forward pass in float64, and a harness around WorkerModel."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from coremill.config.arena import KV_TYPES, ArenaGeometry, blocks_for
from coremill.native.arena import create_arena, map_arena
from coremill.native.packfile import PackFile, open_pack
from coremill.worker.model import SampleSpec, WorkerModel

CONTEXT = 256


@dataclass(frozen=True)
class Tiny:
    """Shape of a random model. Odd sizes on purpose: widths and heads off the panel grid."""

    hidden: int = 40
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 24
    ffn: int = 56
    vocab: int = 77
    layers: int = 2
    tied: bool = False
    bias: bool = False
    rope_dim: int = 20
    theta: float = 10000.0
    rope: tuple = ()  # further keys and values of `rope.*`
    factors: tuple = ()
    architecture: str = "llama"
    window: int = 0
    seed: int = 1


HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
BRANCH_NORMS = {"gemma3": ("post_attention_norm", "post_ffw_norm")}


@dataclass
class TinyModel:
    shape: Tiny
    pack: PackFile
    tensors: dict = field(repr=False)


def _tensors(s: Tiny) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(s.seed)

    def random(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    t = {"token_embd": random(s.vocab, s.hidden), "output_norm": 1 + random(s.hidden, scale=0.1)}
    if not s.tied:
        t["output"] = random(s.vocab, s.hidden, scale=0.3)
    for i in range(s.layers):
        shapes = {
            "attn_q": (q, s.hidden),
            "attn_k": (kv, s.hidden),
            "attn_v": (kv, s.hidden),
            "attn_output": (s.hidden, q),
            "ffn_gate": (s.ffn, s.hidden),
            "ffn_up": (s.ffn, s.hidden),
            "ffn_down": (s.hidden, s.ffn),
        }
        for name, shape in shapes.items():
            t[f"blk.{i}.{name}"] = random(*shape, scale=shape[1] ** -0.5)
            if s.bias:
                t[f"blk.{i}.{name}.bias"] = random(shape[0], scale=0.2)
        for name in ("attn_norm", "ffn_norm", *BRANCH_NORMS.get(s.architecture, ())):
            t[f"blk.{i}.{name}"] = 1 + random(s.hidden, scale=0.1)
        for name in HEAD_NORMS if s.architecture in ("qwen3", "gemma3") else ():
            t[f"blk.{i}.{name}"] = 1 + random(s.head_dim, scale=0.1)
    if s.factors:
        t["rope_freqs"] = np.array(s.factors, np.float32)
    return t


def _write_gguf(path: Path, s: Tiny, tensors: dict[str, np.ndarray]) -> None:
    import gguf

    w = gguf.GGUFWriter(path, s.architecture)
    w.add_block_count(s.layers)
    w.add_embedding_length(s.hidden)
    w.add_feed_forward_length(s.ffn)
    w.add_head_count(s.heads)
    w.add_head_count_kv(s.kv_heads)
    w.add_key_length(s.head_dim)
    w.add_value_length(s.head_dim)
    w.add_context_length(CONTEXT)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(s.rope_dim)
    w.add_rope_freq_base(s.theta)
    if s.window:
        w.add_sliding_window(s.window)
    for key, value in s.rope:
        add = {str: w.add_string, float: w.add_float32, int: w.add_uint32}[type(value)]
        add(f"{s.architecture}.rope.{key}", value)
    w.add_tokenizer_model("gpt2")
    w.add_token_list([chr(ord("0") + i) for i in range(s.vocab)])
    w.add_token_types([1] * s.vocab)
    for name, value in tensors.items():
        w.add_tensor(name if name.endswith(".bias") else f"{name}.weight", value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(**changes) -> TinyModel, packed once per set of changes."""
    from coremill.native.gguf import open_gguf
    from coremill.native.packer import write_pack

    folder, made = tmp_path_factory.mktemp("tiny"), {}

    def make(**changes) -> TinyModel:
        shape = Tiny(**changes)
        if shape not in made:
            gguf_path, pack_path = folder / f"{len(made)}.gguf", folder / f"{len(made)}.pack"
            tensors = _tensors(shape)
            _write_gguf(gguf_path, shape, tensors)
            with open_gguf(gguf_path) as source:
                write_pack(source, pack_path, "00" * 16, {})
            made[shape] = TinyModel(shape, open_pack(pack_path), tensors)
        return made[shape]

    return make


def reference_logits(model: TinyModel, tokens: list[int], angles: np.ndarray, magnitude: float = 1.0) -> np.ndarray:
    """Logits [tokens][vocab] in float64; keys and values are rounded to f16 as the arena holds them.

    angles: [tokens][rope_dim / 2]; local layers of gemma3 take those of base 10,000.
    """
    s, t = model.shape, {name: value.astype(np.float64) for name, value in model.tensors.items()}

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ t[name].T + t.get(f"{name}.bias", 0)

    gemma, head_norms = s.architecture.startswith("gemma"), f"blk.0.{HEAD_NORMS[0]}" in t
    local_angles = np.arange(len(tokens))[:, None] * 10000.0 ** (-2.0 * np.arange(s.rope_dim // 2) / s.rope_dim)

    def rotate(x: np.ndarray, local: bool) -> np.ndarray:  # [tokens][heads][head_dim]
        at = local_angles if local else angles
        x, c, sn = x.copy(), np.cos(at)[:, None] * magnitude, np.sin(at)[:, None] * magnitude
        first, second = slice(0, s.rope_dim, 2), slice(1, s.rope_dim, 2)
        if s.architecture != "llama":
            first, second = slice(0, s.rope_dim // 2), slice(s.rope_dim // 2, s.rope_dim)
        a, b = x[..., first].copy(), x[..., second].copy()
        x[..., first], x[..., second] = a * c - b * sn, a * sn + b * c
        return x

    def branch(x: np.ndarray, layer: int, which: int) -> np.ndarray:
        names = BRANCH_NORMS.get(s.architecture)
        return norm(x, t[f"blk.{layer}.{names[which]}"]) if names else x

    n = len(tokens)
    back = np.arange(n)[:, None] - np.arange(n)  # how far behind a row another one is
    x = t["token_embd"][tokens] * (math.sqrt(s.hidden) if gemma else 1)
    for i in range(s.layers):
        h = norm(x, t[f"blk.{i}.attn_norm"])
        local = s.architecture == "gemma3" and i % 6 != 5
        seen = s.window if local or (s.architecture != "gemma3" and s.window) else n
        mask = np.where((back >= 0) & (back < seen), 0.0, -np.inf)
        q = linear(h, f"blk.{i}.attn_q").reshape(n, s.heads, s.head_dim)
        k = linear(h, f"blk.{i}.attn_k").reshape(n, s.kv_heads, s.head_dim)
        if head_norms:
            q, k = norm(q, t[f"blk.{i}.attn_q_norm"]), norm(k, t[f"blk.{i}.attn_k_norm"])
        q, k = rotate(q, local), rotate(k, local)
        k = k.astype(np.float16).astype(np.float64).repeat(s.heads // s.kv_heads, axis=1)
        v = linear(h, f"blk.{i}.attn_v").reshape(n, s.kv_heads, s.head_dim)
        v = v.astype(np.float16).astype(np.float64).repeat(s.heads // s.kv_heads, axis=1)
        scores = np.einsum("thd,uhd->htu", q, k) / np.sqrt(s.head_dim) + mask
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        x = x + branch(linear(np.einsum("htu,uhd->thd", p, v).reshape(n, -1), f"blk.{i}.attn_output"), i, 0)
        h = norm(x, t[f"blk.{i}.ffn_norm"])
        gate = linear(h, f"blk.{i}.ffn_gate")
        tanh = np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
        gate = gate * (1 + tanh) / 2 if gemma else gate / (1 + np.exp(-gate))
        x = x + branch(linear(gate * linear(h, f"blk.{i}.ffn_up"), f"blk.{i}.ffn_down"), i, 1)
    return norm(x, t["output_norm"]) @ t["token_embd" if s.tied else "output"].T


class Harness:
    """A WorkerModel with an arena of its own, and sequences that find their blocks there."""

    def __init__(
        self, pack: PackFile, *, num_blocks: int = 64, max_step_tokens: int = 64, kv: str = "f16", **options
    ) -> None:
        import os

        self.geometry = ArenaGeometry.for_model(pack.spec, num_blocks, kv)
        fd = create_arena(self.geometry)
        self.arena = map_arena(fd, self.geometry)
        os.close(fd)
        self.vocab = pack.spec.vocab_size
        self.model = WorkerModel(pack, self.arena, max_step_tokens=max_step_tokens, **{"max_sequences": 16, **options})
        self.batch = self.model.new_batch()
        self._next_block = 0

    def close(self) -> None:
        self.model.close()
        self.arena.close()

    def blocks(self, num_tokens: int) -> list[int]:
        """Fresh blocks, in an order that is not the arena's, with a hole between."""
        count = blocks_for(num_tokens)
        first, self._next_block = self._next_block, self._next_block + count + 1
        return list(range(first, first + count))[::-1]

    def step(self, *rows) -> list:
        """rows: (tokens, position, blocks, sample or None)."""
        self.batch.clear()
        for row in rows:
            self.batch.add(*row)
        return self.model.step(self.batch)

    def logits(self, tokens: list[int], chunk: int | None = None) -> np.ndarray:
        """Logits of every position, computed in steps of `chunk` rows."""
        blocks, parts = self.blocks(len(tokens)), []
        chunk = chunk or self.model.max_step_tokens
        for begin in range(0, len(tokens), chunk):
            self.batch.clear()
            self.batch.add(tokens[begin : begin + chunk], begin, blocks)
            raw = self.model.logits_step(self.batch)
            parts.append(np.frombuffer(raw, np.float32).reshape(-1, self.vocab).copy())
        return np.concatenate(parts)

    def generate(
        self, prompt: list[int], count: int, chunk: int | None = None, sample: SampleSpec | None = None
    ) -> list[int]:
        """`count` tokens after the prompt, which is read in steps of `chunk` rows."""
        sample = sample or SampleSpec()
        blocks, tokens = self.blocks(len(prompt) + count), list(prompt)
        chunk, done = chunk or self.model.max_step_tokens, 0
        while len(tokens) < len(prompt) + count:
            end = min(done + chunk, len(tokens))
            out = self.step((tokens[done:end], done, blocks, sample if end == len(tokens) else None))
            done = end
            tokens += [o.token for o in out]
        return tokens[len(prompt) :]


@pytest.fixture(params=KV_TYPES)
def kv(request) -> str:
    return request.param


@pytest.fixture
def harness():
    """harness(pack, **options) -> Harness, closed after the test."""
    made = []

    def make(pack: PackFile, **options) -> Harness:
        made.append(Harness(pack, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def expected():
    return reference_logits
