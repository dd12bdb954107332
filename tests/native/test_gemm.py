"""Matrix kernels: scalar against independent numpy, every other instruction set against scalar, byte by byte."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from coremill.config.formats import BY_NAME, FORMATS
from coremill.native import ffi, lib

_spec = importlib.util.spec_from_file_location("r16", Path(__file__).with_name("r16.py"))
r16 = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(r16)
guarded = r16.guarded

ISAS = {ffi.string(lib.cm_isa_name(i)).decode(): i for i in range(lib.cm_isa_count())}
SCALAR = ISAS["scalar"]
STORE, ADD, SILU_GLU, GELU_GLU, ARGMAX = range(5)
INT8, F32 = 1, 2
INTEGER_FORMATS = [f.type_id for f in FORMATS.values() if f.block_len > 1]
SMALL_BLOCK_FORMATS = [f.type_id for f in FORMATS.values() if f.block_len <= 32]


@pytest.fixture(params=[name for name in ISAS if name != "scalar"])
def isa(request) -> int:
    if not lib.cm_isa_supported(ISAS[request.param]):
        pytest.skip(f"this CPU (under the mask, if any) lacks {request.param}")
    return ISAS[request.param]


def ptr(array: np.ndarray | None, kind: str):
    if array is None:
        return ffi.NULL
    return ffi.cast(kind, array.ctypes.data)


# ---- calling the kernels ----


def pack_acts(isa: int, x: np.ndarray, forms: int = INT8 | F32) -> SimpleNamespace:
    """cm_act of rows x [tokens][>= k]; the integer form only when k allows it."""
    tokens, k = x.shape
    groups = -(-tokens // 4)
    if k % 32:
        forms &= ~INT8
    act = SimpleNamespace(k=k, tokens=tokens, forms=forms, q=None, blocks=None, f=None)
    if forms & INT8:
        act.q = guarded((groups, k // 4, 4, 4), np.int8, 99)
        act.blocks = guarded((groups, k // 32, 64), np.uint8, 99)
    if forms & F32:
        act.f = guarded((groups, k, 4), np.float32, 99)
    pointers = ptr(act.q, "int8_t *"), ptr(act.blocks, "void *"), ptr(act.f, "float *")
    assert lib.cm_test_act_pack(isa, k, tokens, ptr(x, "float *"), x.strides[0] // 4, forms, *pointers) == 0
    return act


class Matrix:
    """Random rows in the given formats, one per panel, packed by the numpy writer."""

    def __init__(self, rng, formats: list[int], n: int, k: int) -> None:
        assert len(formats) * 16 >= n > (len(formats) - 1) * 16
        self.n, self.k, self.num_panels = n, k, len(formats)
        counts = [min(16, n - 16 * i) for i in range(len(formats))]
        self.formats = formats
        self.raw = [r16.random_rows(rng, FORMATS[f], c, k) for f, c in zip(formats, counts, strict=True)]
        self.base, self.table = r16.pack_matrix(formats, self.raw, k)

    def rows(self) -> np.ndarray:
        """What the gguf package makes of the same bytes, float32 [n][k]."""
        pairs = zip(self.formats, self.raw, strict=True)
        return np.concatenate([gguf.dequantize(raw, gguf.GGMLQuantizationType(f)) for f, raw in pairs])

    def args(self) -> tuple:
        return ptr(self.base, "uint8_t *"), self.n, self.k, ptr(self.table, "void *"), self.num_panels


def gather(isa: int, w: Matrix, ids: list[int], scale: float = 1.0) -> np.ndarray:
    dst = guarded((len(ids), w.k), np.float32)
    wanted = guarded(len(ids), np.int32, ids)
    args = ptr(wanted, "int32_t *"), len(ids), ptr(dst, "float *"), w.k, scale
    assert lib.cm_test_gather_rows(isa, *w.args(), *args) == 0
    return dst


def gemm(isa: int, w: Matrix, act, epilogue=STORE, bias=None, residual=None, panels=None, keep_logits=()):
    """One call over all tokens; dst, and for ARGMAX best, best_id, nonfinite and the kept logits."""
    out = SimpleNamespace(dst=None, best=None, best_id=None, nonfinite=None, logits={})
    rows = ffi.NULL
    if epilogue == ARGMAX:
        out.best = guarded(act.tokens, np.float32, -np.inf)
        out.best_id = guarded(act.tokens, np.int32, -1)
        out.nonfinite = guarded(act.tokens, np.uint8, 0)
        out.logits = {t: guarded(w.n, np.float32, 99) for t in keep_logits}
        rows = ffi.new("float *[]", [ptr(out.logits.get(t), "float *") for t in range(act.tokens)])
    else:
        width = w.num_panels * (8 if epilogue in (SILU_GLU, GELU_GLU) else 16)
        out.dst = guarded((act.tokens, width), np.float32, 99 if residual is None else residual)
    first, last = panels or (0, w.num_panels)
    code = lib.cm_test_gemm(
        *(isa, *w.args(), act.tokens, ptr(act.q, "int8_t *"), ptr(act.blocks, "void *"), ptr(act.f, "float *")),
        *(epilogue, ptr(bias, "float *"), ptr(out.dst, "float *"), 0 if out.dst is None else out.dst.shape[1]),
        *(ptr(out.best, "float *"), ptr(out.best_id, "int32_t *"), ptr(out.nonfinite, "uint8_t *"), rows),
        *(first, last),
    )
    assert code == 0
    return out


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


def activations(rng, tokens: int, k: int) -> np.ndarray:
    """Rows with the occasional zero, tiny and huge block, in guarded memory."""
    x = guarded((tokens, k), np.float32)
    x[:] = rng.standard_normal((tokens, k))
    for scale in (0.0, 1e-30, 1e-38, 1e-42, 1e6):
        t, b = rng.integers(tokens), rng.integers(-(-k // 32)) * 32
        if rng.random() < 0.3:
            x[t, b : b + 32] *= np.float32(scale)
    return x


def random_formats(rng, k: int, panels: int) -> list[int]:
    """One format per panel: usually runs of the same, as fused matrices have them."""
    allowed = [f.type_id for f in FORMATS.values() if k % f.block_len == 0]
    first, second = rng.choice(allowed, 2)
    change = int(rng.integers(0, panels + 1)) if rng.random() < 0.5 else panels
    return [int(first)] * change + [int(second)] * (panels - change)


# ---- the packed form itself ----


@pytest.mark.parametrize("name", BY_NAME)
def test_gathered_rows_are_what_gguf_dequantises(name):
    rng = np.random.default_rng(1)
    fmt = BY_NAME[name]
    w = Matrix(rng, [fmt.type_id] * 3, 41, 37 if fmt.block_len == 1 else 3 * fmt.block_len)
    ids = [0, 40, 15, 16, 7, 7]
    expected = w.rows()[ids]
    assert same_bytes(gather(SCALAR, w, ids), expected)
    assert same_bytes(gather(SCALAR, w, ids, scale=12.5), expected * np.float32(12.5))


@pytest.mark.parametrize("name", BY_NAME)
def test_the_packer_writes_the_same_panels(name):
    rng = np.random.default_rng(2)
    fmt = BY_NAME[name]
    k = 5 if fmt.block_len == 1 else 2 * fmt.block_len
    raw = r16.random_rows(rng, fmt, 23, k)
    expected = b"".join(r16.pack_panel(fmt, raw[i : i + 16], k) for i in (0, 16))
    size = lib.cm_panel_bytes(fmt.type_id, k)
    assert len(expected) == 2 * size
    packed = guarded(2 * size, np.uint8, 0xAA)
    done = lib.cm_pack_panels(
        *(fmt.type_id, ptr(raw, "uint8_t *"), raw.nbytes, k, 23, ptr(packed, "uint8_t *"), packed.nbytes, size)
    )
    assert done == 0
    assert packed.tobytes() == expected


# ---- activations ----


def read_blocks(act) -> SimpleNamespace:
    """The fields of cm_act_block, each [tokens][k/32]."""
    raw = np.ascontiguousarray(act.blocks)

    def field(start: int, dtype, width: int) -> np.ndarray:
        values = np.ascontiguousarray(raw[..., start : start + 16]).view(dtype)
        return np.moveaxis(values.reshape(*raw.shape[:2], 4, width), 2, 1).reshape(-1, raw.shape[1], width)

    return SimpleNamespace(
        scale=field(0, np.float32, 1)[..., 0],
        scaled_sum=field(16, np.float32, 1)[..., 0],
        neg_sum=field(32, np.int32, 1)[..., 0],
        neg_halves=field(48, np.int16, 2),
    )


def act_codes(act) -> np.ndarray:
    """int8 [padded tokens][k]"""
    return np.moveaxis(act.q, 2, 1).reshape(-1, act.k)


def test_activations_against_numpy():
    rng = np.random.default_rng(3)
    for tokens, k in [(1, 32), (4, 64), (7, 576), (30, 96)]:
        x = activations(rng, tokens, k)
        act, f32 = pack_acts(SCALAR, x), np.float32
        padded = np.concatenate([x, np.zeros((-tokens % 4, k), f32)])
        blocks = padded.reshape(len(padded), -1, 32)
        amax = np.abs(blocks).max(axis=-1)
        with np.errstate(divide="ignore", over="ignore"):
            inv = f32(127) / amax
        used = np.isfinite(inv)
        scale = np.where(used, amax / f32(127), f32(0))
        codes = np.rint(blocks * np.where(used, inv, f32(0))[..., None]).astype(np.int32)
        fields = read_blocks(act)
        assert abs(codes).max() <= 127
        assert same_bytes(act_codes(act).astype(np.int32), codes.reshape(len(padded), k))
        assert same_bytes(fields.scale, scale)
        assert same_bytes(fields.neg_sum, -codes.sum(axis=-1, dtype=np.int32))
        assert same_bytes(fields.scaled_sum, scale * codes.sum(axis=-1).astype(f32))
        halves = codes.reshape(*codes.shape[:2], 2, 16).sum(axis=-1)
        assert (fields.neg_halves == -halves).all()
        assert same_bytes(np.moveaxis(act.f, 2, 1).reshape(len(padded), k), padded)


def test_activations_are_the_same_everywhere(isa):
    rng = np.random.default_rng(4)
    for case in range(60):
        tokens, k = int(rng.integers(1, 20)), int(rng.integers(1, 24)) * 32
        if case % 3 == 0:
            k = int(rng.integers(1, 100))
        x = activations(rng, tokens, k)
        x.flat[rng.integers(x.size)] = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, 1e-45])
        ours, scalar = pack_acts(isa, x), pack_acts(SCALAR, x)
        for name in ("q", "blocks", "f"):
            a, b = getattr(ours, name), getattr(scalar, name)
            assert a is b is None or same_bytes(a, b), (tokens, k, name)


def test_ties_round_to_even(isa):
    x = guarded((1, 32), np.float32, 0)
    x[0, :8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]  # amax 127: the factor is exactly 1
    for which in (isa, SCALAR):
        assert list(act_codes(pack_acts(which, x))[0, :8]) == [127, 0, 2, 2, 0, -2, -2, 126]


# ---- products ----


def dequantised_activations(act) -> np.ndarray:
    scale = np.repeat(read_blocks(act).scale, 32, axis=-1).astype(np.float64)
    return (act_codes(act) * scale)[: act.tokens]


@pytest.mark.parametrize("name", BY_NAME)
def test_scalar_against_float64(name):
    rng = np.random.default_rng(5)
    fmt = BY_NAME[name]
    for tokens, blocks in [(1, 1), (6, 3), (3, 18 if fmt.block_len <= 32 else 4)]:
        k = blocks * fmt.block_len if fmt.block_len > 1 else 50 * blocks + 1
        w = Matrix(rng, [fmt.type_id] * 2, 27, k)
        x = activations(rng, tokens, k)
        act = pack_acts(SCALAR, x)
        inputs = x.astype(np.float64) if fmt.block_len == 1 else dequantised_activations(act)
        rows = w.rows().astype(np.float64)
        expected, size = inputs @ rows.T, np.abs(inputs) @ np.abs(rows).T
        if fmt.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
            size = size * 20  # codes and minimum cancel
        got = gemm(SCALAR, w, act).dst
        assert (np.abs(got[:, :27] - expected) <= 2e-6 * size + 1e-30).all()
        assert not got[:, 27:].any()


def test_epilogues_of_scalar():
    rng = np.random.default_rng(6)
    w = Matrix(rng, [3] * 4, 64, 64)
    x = activations(rng, 5, 64)
    act, plain = pack_acts(SCALAR, x), gemm(SCALAR, w, pack_acts(SCALAR, x)).dst
    bias, residual = rng.standard_normal((2, 64)).astype(np.float32)
    residual = np.tile(residual, (5, 1))
    assert same_bytes(gemm(SCALAR, w, act, STORE, bias).dst, plain + bias)
    assert same_bytes(gemm(SCALAR, w, act, ADD, bias, residual).dst, residual + (plain + bias))

    glu = gemm(SCALAR, w, act, SILU_GLU, bias).dst
    parts = (plain + bias).reshape(5, 2, 2, 16).astype(np.float64)
    gate, up = parts[:, :, 0].reshape(5, 32), parts[:, :, 1].reshape(5, 32)
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(glu, expected, rtol=2e-6, atol=1e-30)

    top = gemm(SCALAR, w, act, ARGMAX, bias, keep_logits=(0, 3))
    assert same_bytes(top.best, (plain + bias).max(axis=1))
    assert (top.best_id == (plain + bias).argmax(axis=1)).all()
    assert not top.nonfinite.any()
    assert set(top.logits) == {0, 3}
    assert all(same_bytes(row, (plain + bias)[t]) for t, row in top.logits.items())


def compare_all_epilogues(isa: int, w: Matrix, act, rng) -> None:
    bias = guarded(w.num_panels * 16, np.float32)
    bias[:] = rng.standard_normal(bias.size)
    bias = bias if rng.random() < 0.5 else None
    residual = rng.standard_normal((act.tokens, w.num_panels * 16)).astype(np.float32)
    kept = [t for t in range(act.tokens) if rng.random() < 0.5]
    calls = [{"epilogue": STORE}, {"epilogue": ADD, "residual": residual}]
    calls += [{"epilogue": ARGMAX, "keep_logits": kept}]
    if w.num_panels % 2 == 0:
        calls += [{"epilogue": SILU_GLU}, {"epilogue": GELU_GLU}]
    for call in calls:
        ours, scalar = gemm(isa, w, act, bias=bias, **call), gemm(SCALAR, w, act, bias=bias, **call)
        label = (w.formats, w.n, w.k, act.tokens, call["epilogue"])
        for name in ("dst", "best", "best_id", "nonfinite"):
            a, b = getattr(ours, name), getattr(scalar, name)
            assert a is b is None or same_bytes(a, b), (label, name)
        assert ours.logits.keys() == scalar.logits.keys()
        assert all(same_bytes(ours.logits[t], row) for t, row in scalar.logits.items()), label


@pytest.mark.parametrize("name", BY_NAME)
def test_every_token_count_gives_the_bytes_of_scalar(isa, name):
    rng = np.random.default_rng(7)
    fmt = BY_NAME[name]
    k = 9 if fmt.block_len == 1 else 3 * fmt.block_len if fmt.block_len == 32 else 256
    w = Matrix(rng, [fmt.type_id] * 3, 45, k)
    for tokens in [*range(1, 36), 47, 64, 70, 127, 129]:
        x = activations(rng, tokens, k)
        act = pack_acts(SCALAR, x)
        assert same_bytes(gemm(isa, w, act).dst, gemm(SCALAR, w, act).dst), tokens


def test_random_shapes_give_the_bytes_of_scalar(isa):
    rng = np.random.default_rng(8)
    for _ in range(120):
        k = int(rng.choice([256, 512]) if rng.random() < 0.5 else rng.integers(1, 20) * 32)
        if rng.random() < 0.15:
            k = int(rng.integers(1, 90))
        n, tokens = int(rng.integers(1, 130)), int(rng.integers(1, 71) ** rng.choice([0.5, 1]))
        w = Matrix(rng, random_formats(rng, k, -(-n // 16)), n, k)
        compare_all_epilogues(isa, w, pack_acts(SCALAR, activations(rng, tokens, k)), rng)


def test_glu_panels_of_two_formats(isa):
    rng = np.random.default_rng(9)
    for gate, up in [(14, 12), (12, 14), (0, 8), (1, 30), (3, 13)]:
        w = Matrix(rng, [gate, up] * 2, 64, 256)
        for tokens in (1, 6, 13, 25):
            act = pack_acts(SCALAR, activations(rng, tokens, 256))
            for glu in (SILU_GLU, GELU_GLU):
                assert same_bytes(gemm(isa, w, act, glu).dst, gemm(SCALAR, w, act, glu).dst)


def test_extreme_codes_are_exact(isa):
    """All codes and activations at their largest: where int16 sums would wrap."""
    for fmt in (FORMATS[i] for i in INTEGER_FORMATS):
        for code, sign in [(0xFF, 1), (0xFF, -1), (0x00, 1), (0x80, 1), (0x7F, -1)]:
            w = Matrix(np.random.default_rng(10), [fmt.type_id] * 2, 32, 256)
            for raw in w.raw:
                keep = raw.reshape(16, -1, fmt.block_bytes)
                heads = keep[..., :4].copy(), keep[..., -2:].copy()
                keep[:] = code
                if fmt.name == "Q6_K":
                    keep[..., -2:] = heads[1]
                else:
                    width = 4 if fmt.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 2
                    keep[..., :width] = heads[0][..., :width]
            w.base, w.table = r16.pack_matrix(w.formats, w.raw, w.k)
            x = guarded((5, 256), np.float32, sign)
            act = pack_acts(isa, x)
            assert abs(act.q[0]).min() == 127
            assert same_bytes(gemm(isa, w, act).dst, gemm(SCALAR, w, act).dst), (fmt.name, code)


@pytest.mark.parametrize("which", list(ISAS))
def test_any_split_gives_the_same_bytes(which):
    isa = ISAS[which]
    if not lib.cm_isa_supported(isa):
        pytest.skip(f"this CPU (under the mask, if any) lacks {which}")
    rng = np.random.default_rng(11)
    w = Matrix(rng, [3, 3, 3, 8, 8, 0], 90, 64)
    x = activations(rng, 23, 64)
    whole = gemm(isa, w, pack_acts(isa, x)).dst
    for token in range(23):
        alone = gemm(isa, w, pack_acts(isa, x[token : token + 1])).dst
        assert same_bytes(alone[0], whole[token])
    for cut in range(1, 6):
        left, right = (gemm(isa, w, pack_acts(isa, x), panels=p).dst for p in ((0, cut), (cut, 6)))
        assert same_bytes(left[:, : cut * 16], whole[:, : cut * 16])
        assert same_bytes(right[:, cut * 16 :], whole[:, cut * 16 :])
        assert (left[:, cut * 16 :] == 99).all() and (right[:, : cut * 16] == 99).all()


# ---- argmax and values that are not finite ----


@pytest.mark.parametrize("which", list(ISAS))
def test_argmax_ties_and_nonfinite(which):
    isa = ISAS[which]
    if not lib.cm_isa_supported(isa):
        pytest.skip(f"this CPU (under the mask, if any) lacks {which}")
    rng = np.random.default_rng(12)
    w = Matrix(rng, [0] * 3, 43, 8)
    act = pack_acts(isa, guarded((5, 8), np.float32, 0))  # all products are 0: the bias decides

    def top(**values):
        bias = guarded(48, np.float32, 0)
        for at, value in values.items():
            bias[int(at[1:])] = value
        out = gemm(isa, w, act, ARGMAX, bias)
        assert len(set(out.best_id)) == len(set(out.nonfinite)) == 1
        return int(out.best_id[0]), float(out.best[0]), int(out.nonfinite[0])

    assert top() == (0, 0, 0)
    assert top(_17=2, _33=2, _5=1) == (17, 2, 0)
    assert top(_16=2, _1=2, _42=2) == (1, 2, 0)
    assert top(_42=3) == (42, 3, 0)
    assert top(_43=9, _47=np.nan) == (0, 0, 0)  # padding rows do not count
    assert top(_20=np.nan, _30=1) == (30, 1, 1)
    assert top(_20=np.inf) == (20, np.inf, 1)
    assert top(_20=-np.inf) == (0, 0, 1)
    assert top(**{f"_{i}": -np.inf for i in range(43)})[0] == -1
    assert top(**{f"_{i}": -5 - i % 2 for i in range(43)}) == (0, -5, 0)


@pytest.mark.parametrize("which", list(ISAS))
def test_a_bad_activation_shows_and_stays_in_its_row(which):
    isa = ISAS[which]
    if not lib.cm_isa_supported(isa):
        pytest.skip(f"this CPU (under the mask, if any) lacks {which}")
    rng = np.random.default_rng(13)
    for type_id in SMALL_BLOCK_FORMATS:
        w = Matrix(rng, [type_id] * 2, 32, 64)
        x = activations(rng, 9, 64)
        good = gemm(isa, w, pack_acts(isa, x), ARGMAX)
        for value in (np.nan, np.inf, -np.inf):
            x[4, 40] = value
            bad = gemm(isa, w, pack_acts(isa, x), ARGMAX)
            assert list(np.flatnonzero(bad.nonfinite)) == [4]
            others = np.arange(9) != 4
            assert same_bytes(bad.best[others], good.best[others])
