"""Attention over paged blocks, in both forms of keys and values: scalar against numpy in double precision, then bytes:
instruction sets against each other, batchings and block orders against the plain case."""

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from coremill.config.arena import KV_TYPES, ArenaGeometry
from coremill.config.options import BY_NAME
from coremill.native import ffi, lib

_spec = importlib.util.spec_from_file_location("r16", Path(__file__).with_name("r16.py"))
r16 = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(r16)
guarded = r16.guarded

ISAS = {ffi.string(lib.cm_isa_name(i)).decode(): i for i in range(lib.cm_isa_count())}
SCALAR = ISAS["scalar"]
BLOCK = 32
KV = {name: lib.cm_kv_type(name.encode()) for name in ("f16", "q8")}


@pytest.fixture(params=list(KV))
def kv(request) -> str:
    return request.param


@pytest.fixture(params=list(ISAS))
def isa(request) -> int:
    if not lib.cm_isa_supported(ISAS[request.param]):
        pytest.skip(f"this CPU (under the mask, if any) lacks {request.param}")
    return ISAS[request.param]


def ptr(array: np.ndarray, kind: str):
    return ffi.cast(kind, array.ctypes.data)


def num_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


@dataclass
class Shape:
    head_dim: int
    num_kv_heads: int
    group: int  # query heads per KV head
    num_layers: int = 2
    layer: int = 1

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


@dataclass
class Sequence:
    """Random keys, values and queries of every position, [tokens][heads * head_dim]."""

    shape: Shape
    tokens: int
    seed: int
    k: np.ndarray = field(init=False)
    v: np.ndarray = field(init=False)
    q: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng, shape = np.random.default_rng(self.seed), self.shape
        kv_width = shape.num_kv_heads * shape.head_dim
        self.k = (rng.standard_normal((self.tokens, kv_width)) * 2).astype(np.float32)
        self.v = rng.standard_normal((self.tokens, kv_width)).astype(np.float32)
        self.q = (rng.standard_normal((self.tokens, shape.num_heads * shape.head_dim)) * 2).astype(np.float32)


class Arena:
    """Blocks full of NaN right before an unreadable page, handed out in random order."""

    def __init__(self, shape: Shape, kv: str, total_blocks: int, rng: np.random.Generator) -> None:
        head_bytes = lib.cm_kv_head_bytes(KV[kv], shape.head_dim)
        layer_bytes = head_bytes * shape.num_kv_heads
        strides = layer_bytes * shape.num_layers, layer_bytes, head_bytes
        self.shape = shape
        self.geometry = np.array([*strides, shape.num_layers, shape.num_kv_heads, shape.head_dim, KV[kv]], np.int64)
        self.memory = guarded((total_blocks, strides[0] // 2), np.float16, np.nan)
        self.free = list(rng.permutation(total_blocks))

    def take(self, n: int) -> np.ndarray:
        return np.array([self.free.pop() for _ in range(n)], np.int32)

    def args(self) -> tuple:
        return ptr(self.memory, "uint8_t *"), ptr(self.geometry, "int64_t *")

    def store(self, isa: int, seq: Sequence, begin: int, end: int, table: np.ndarray) -> None:
        k, v = (guarded((end - begin, a.shape[1]), np.float32, a[begin:end]) for a in (seq.k, seq.v))
        blocks = guarded(num_blocks(end), np.int32, table[: num_blocks(end)])
        rows = ptr(k, "float *"), ptr(v, "float *"), k.shape[1], end - begin
        code = lib.cm_test_kv_store(isa, *self.args(), self.shape.layer, *rows, begin, ptr(blocks, "int32_t *"))
        assert code == 0

    def attend(self, isa: int, parts: list[tuple], first_unit: int = 0) -> list[np.ndarray]:
        """One step over parts (sequence, begin, end, block table); outputs part by part."""
        rows = guarded(len(parts) + 1, np.int32, np.cumsum([0] + [end - begin for _, begin, end, _ in parts]))
        positions = guarded(len(parts), np.int32, [begin for _, begin, _, _ in parts])
        tables = [table[: num_blocks(end)] for _, _, end, table in parts]
        begins = guarded(len(parts), np.int32, np.cumsum([0] + [len(t) for t in tables])[:-1])
        blocks = guarded(sum(map(len, tables)), np.int32, np.concatenate(tables))
        queries = np.concatenate([seq.q[begin:end] for seq, begin, end, _ in parts])
        q, out = guarded(queries.shape, np.float32, queries), guarded(queries.shape, np.float32, np.nan)
        width = queries.shape[1]
        units = lib.cm_test_attention(
            *(isa, *self.args(), self.shape.layer, self.shape.num_heads, self.shape.head_dim**-0.5),
            *(ptr(q, "float *"), width, ptr(out, "float *"), width, len(parts), ptr(rows, "int32_t *")),
            *(ptr(positions, "int32_t *"), ptr(begins, "int32_t *"), ptr(blocks, "int32_t *"), first_unit),
        )
        assert units >= len(parts)
        return np.split(out, rows[1:-1])


def plain(isa: int, seq: Sequence, kv: str) -> np.ndarray:
    """All positions of one sequence in one step, blocks in order of the arena."""
    arena = Arena(seq.shape, kv, num_blocks(seq.tokens), np.random.default_rng(0))
    table = arena.take(num_blocks(seq.tokens))
    arena.store(isa, seq, 0, seq.tokens, table)
    return arena.attend(isa, [(seq, 0, seq.tokens, table)])[0]


def exact(seq: Sequence, kv: str) -> np.ndarray:
    """From f16 keys and values for f16, for q8 from the originals."""
    shape, held = seq.shape, np.float16 if kv == "f16" else np.float32
    k, v = (a.astype(held).astype(np.float64).reshape(seq.tokens, -1, shape.head_dim) for a in (seq.k, seq.v))
    q = seq.q.astype(np.float64).reshape(seq.tokens, shape.num_kv_heads, shape.group, shape.head_dim)
    scores = np.einsum("ihgd,jhd->hgij", q, k) * shape.head_dim**-0.5
    scores[..., np.triu(np.ones((seq.tokens, seq.tokens), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hgij,jhd->ihgd", weights, v).reshape(seq.tokens, -1)


SHAPES = [
    *(Shape(64, 3, 3), Shape(128, 1, 4), Shape(80, 2, 1), Shape(96, 1, 7), Shape(16, 2, 2), Shape(32, 1, 1)),
    *(Shape(24, 2, 9), Shape(8, 1, 3), Shape(200, 1, 2), Shape(256, 1, 5), Shape(16, 1, 50)),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.head_dim}x{s.num_kv_heads}x{s.group}")


@shapes
@pytest.mark.parametrize("tokens", [1, 31, 33, 101])
def test_scalar_against_double_precision(shape, tokens):
    """Scores reach 60, where a float's last place is 4e-6: that is the error of a weight."""
    seq = Sequence(shape, tokens, tokens)
    assert np.abs(plain(SCALAR, seq, "f16") - exact(seq, "f16")).max() < 3e-5


@shapes
@pytest.mark.parametrize("tokens", [1, 31, 33, 101])
def test_scalar_q8_against_double_precision(shape, tokens):
    """Scores of a deviation of 1: those of 16, as above, are off by 0.1 with 8 bits. Values have 127 steps each way."""
    seq = Sequence(shape, tokens, tokens)
    seq.q *= 0.25
    error = np.abs(plain(SCALAR, seq, "q8") - exact(seq, "q8"))
    print(error.max(), error.mean())
    assert error.max() < 0.1 and error.mean() < 0.01


@shapes
def test_instruction_sets_agree(isa, kv, shape):
    for tokens in (1, 32, 75):
        seq = Sequence(shape, tokens, tokens)
        assert plain(isa, seq, kv).tobytes() == plain(SCALAR, seq, kv).tobytes()


def test_stored_bytes(isa):
    """K transposed and V as it comes, in the layer and slots asked for; a block begun is zeroed, others untouched."""
    shape = Shape(24, 2, 1)
    seq = Sequence(shape, 40, 1)
    arena = Arena(shape, "f16", 3, np.random.default_rng(1))
    table = arena.take(2)
    for begin, end in ((0, 5), (5, 33), (33, 40)):
        arena.store(isa, seq, begin, end, table)
    expected = np.full((3, 2, 2, 2, BLOCK * 24), np.nan, np.float16)  # [block][layer][head][K, V]
    expected[table, 1] = 0
    for t in range(40):
        for head in range(2):
            tile = expected[table[t // BLOCK], 1, head]
            tile[0].reshape(24, BLOCK)[:, t % BLOCK] = seq.k[t, head * 24 : head * 24 + 24]
            tile[1].reshape(BLOCK, 24)[t % BLOCK] = seq.v[t, head * 24 : head * 24 + 24]
    assert arena.memory.tobytes() == expected.tobytes()


def random_chunks(rng: np.random.Generator, tokens: int, largest: int) -> list[int]:
    """Boundaries 0 .. tokens of random chunks."""
    ends = [0]
    while ends[-1] < tokens:
        ends.append(min(tokens, ends[-1] + int(rng.integers(1, largest + 1))))
    return ends


@pytest.mark.parametrize("shape", [Shape(64, 3, 3), Shape(128, 1, 8), Shape(40, 2, 5), Shape(16, 1, 1)], ids=str)
@pytest.mark.parametrize("largest", [1, 3, 40])
def test_any_batching_gives_the_same_bytes(isa, kv, shape, largest):
    """Several sequences grow by random chunks through mixed steps, with random block tables and unit orders."""
    rng = np.random.default_rng(largest)
    num_seqs = 4 if isa != SCALAR else 2
    seqs = [Sequence(shape, int(rng.integers(30, 100 if largest > 1 else 70)), s) for s in range(num_seqs)]
    expected = [plain(isa, seq, kv) for seq in seqs]
    arena = Arena(shape, kv, sum(num_blocks(s.tokens) for s in seqs), rng)
    tables = [arena.take(num_blocks(s.tokens)) for s in seqs]
    plans = [random_chunks(rng, s.tokens, largest) for s in seqs]
    got = [[] for _ in seqs]
    while any(len(plan) > 1 for plan in plans):
        ready = [i for i, plan in enumerate(plans) if len(plan) > 1]
        chosen = list(rng.permutation(ready)[: rng.integers(1, len(ready) + 1)])
        parts = [(seqs[i], plans[i][0], plans[i][1], tables[i]) for i in chosen]
        for part in parts:
            arena.store(isa, *part)
        outputs = arena.attend(isa, parts, int(rng.integers(0, 1000)))
        for i, output in zip(chosen, outputs, strict=True):
            got[i].append(output)
            plans[i].pop(0)
    for pieces, whole in zip(got, expected, strict=True):
        assert np.concatenate(pieces).tobytes() == whole.tobytes()


def test_long_context(isa, kv):
    """Late rows over many tiles: decode rows and a chunk in one step, the chunk split over several units."""
    shape = Shape(64, 1, 3)
    seq = Sequence(shape, 900, 1)
    arena = Arena(shape, kv, num_blocks(900), np.random.default_rng(2))
    table = arena.take(num_blocks(900))
    arena.store(isa, seq, 0, 900, table)
    decode, chunk = arena.attend(isa, [(seq, 850, 851, table), (seq, 800, 900, table)])
    few = arena.attend(SCALAR, [(seq, 800, 803, table), (seq, 850, 851, table), (seq, 897, 900, table)])
    assert decode.tobytes() == few[1].tobytes() == chunk[50:51].tobytes()
    assert chunk[:3].tobytes() == few[0].tobytes() and chunk[97:].tobytes() == few[2].tobytes()


def test_huge_and_tiny_scores(isa, kv):
    """Scores far apart, so that most weights are 0: still finite, and the same bytes."""
    shape = Shape(64, 1, 3)
    seq = Sequence(shape, 70, 3)
    seq.q *= 200
    seq.k[40:50] *= 20
    got = plain(isa, seq, kv)
    assert np.isfinite(got).all() and got.tobytes() == plain(SCALAR, seq, kv).tobytes()


def test_nonfinite_keys_stay_with_their_rows(isa, kv):
    """A NaN key spoils the rows that see it and no other, however they are batched."""
    shape = Shape(16, 1, 2)
    seq = Sequence(shape, 60, 4)
    seq.k[45, 3] = np.nan
    got = plain(isa, seq, kv)
    assert np.isfinite(got[:45]).all() and np.isnan(got[45:]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e9])
def test_nonfinite_values_stay_with_their_rows(isa, value):
    """q8: also values, and those too large for an f16 scale."""
    seq = Sequence(Shape(24, 1, 2), 60, 5)
    seq.v[45, 3] = value
    got = plain(isa, seq, "q8")
    assert np.isfinite(got[:45]).all() and np.isnan(got[45:]).all()


def test_q8_zeros(isa):
    """Rows of zeros: a query without direction weighs all it sees alike, zero keys and values give zeros."""
    seq = Sequence(Shape(64, 1, 2), 50, 6)
    seq.q[10:20] = 0
    seq.k[5:9] = 0
    seq.v[5:9] = 0
    got = plain(isa, seq, "q8")
    assert got.tobytes() == plain(SCALAR, seq, "q8").tobytes()
    assert np.abs(got[12, :64] - seq.v[:13].mean(axis=0)).max() < 0.02
    seq.v[:] = 0
    assert (plain(isa, seq, "q8") == 0).all()


def hadamard(n: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 256])
def test_stored_codes_of_q8(isa, head_dim):
    """Codes times scales are the rotated keys and the values to half a step; a block begun is zeroed."""
    shape = Shape(head_dim, 2, 1)
    seq = Sequence(shape, 40, 1)
    arena = Arena(shape, "q8", 3, np.random.default_rng(1))
    table = arena.take(2)
    for begin, end in ((0, 5), (5, 33), (33, 40)):
        arena.store(isa, seq, begin, end, table)
    untouched = np.delete(np.arange(3), table)
    heads = arena.memory.view(np.uint8).reshape(3, 2, 2, -1)  # [block][layer][head]
    assert np.isnan(arena.memory[untouched]).all() and np.isnan(heads[:, 0].copy().view(np.float16)).all()
    size = head_dim & -head_dim
    rotate = np.kron(np.eye(head_dim // size), hadamard(size))
    for t in range(64):
        for head in range(2):
            tile, slot = heads[table[t // BLOCK], 1, head], t % BLOCK
            keys = tile[: 32 * head_dim].reshape(-1, 32, 4)[:, slot].reshape(-1)
            values = tile[32 * head_dim : 64 * head_dim].reshape(8, head_dim, 4)[slot // 4, :, slot % 4]
            scales = tile[64 * head_dim :].view(np.float16).reshape(2, 32)[:, slot].astype(np.float64)
            if t >= 40:
                assert not keys.any() and not values.any() and not scales.any()
                continue
            row = slice(head * head_dim, (head + 1) * head_dim)
            for codes, scale, wanted in (
                (keys.astype(np.int64) - 128, scales[0], rotate @ seq.k[t, row]),
                (values.view(np.int8).astype(np.int64), scales[1], seq.v[t, row]),
            ):
                assert np.abs(codes).max() == 127 and np.abs(codes * scale - wanted).max() < 0.501 * scale


def test_head_bytes():
    """Python and C agree on the sizes of a block."""
    for name, kind in KV.items():
        for head_dim in (8, 64, 200):
            assert lib.cm_kv_head_bytes(kind, head_dim) == ArenaGeometry(1, 1, head_dim, 1, kv_type=name).head_bytes
    assert lib.cm_kv_type(b"q3") == -1 and lib.cm_kv_head_bytes(-1, 64) == 0
    assert tuple(KV) == KV_TYPES == BY_NAME["kv"].kind.values


def test_bench(isa, kv):
    assert lib.cm_bench_attention(isa, KV[kv], 6, 2, 16, 2, 40, 3, 2, 1) > 0
    assert lib.cm_bench_attention(isa, KV[kv], 5, 2, 16, 2, 40, 3, 2, 1) == -1
    assert lib.cm_bench_attention(isa, 7, 6, 2, 16, 2, 40, 3, 2, 1) == -1
    assert lib.cm_bench_fma(isa, 0.001) > 0
