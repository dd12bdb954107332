"""Row kernels: scalar against numpy, every other instruction set against scalar, byte by byte, in guarded memory."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

from coremill.native import ffi, lib

_spec = importlib.util.spec_from_file_location("r16", Path(__file__).with_name("r16.py"))
r16 = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(r16)
guarded = r16.guarded

ISAS = {ffi.string(lib.cm_isa_name(i)).decode(): i for i in range(lib.cm_isa_count())}
SCALAR = ISAS["scalar"]
EXP2, EXP, SILU, TO_F16, FROM_F16, GELU = range(6)


@pytest.fixture(params=[name for name in ISAS if name != "scalar"])
def isa(request) -> int:
    if not lib.cm_isa_supported(ISAS[request.param]):
        pytest.skip(f"this CPU (under the mask, if any) lacks {request.param}")
    return ISAS[request.param]


def ptr(array: np.ndarray, kind: str):
    return ffi.cast(kind, array.ctypes.data)


def same_bytes(got: np.ndarray, expected: np.ndarray) -> bool:
    """Equal bits, except that any NaN is as good as another."""
    bits = f"u{got.itemsize}"
    nan = np.isnan(expected)
    return np.array_equal(np.isnan(got), nan) and np.array_equal(got[~nan].view(bits), expected[~nan].view(bits))


# ---- lane functions ----


def apply(isa: int, op: int, x: np.ndarray) -> np.ndarray:
    src = guarded(x.shape, x.dtype, x)
    dst = guarded(x.shape, np.float16 if op == TO_F16 else np.float32, 7)
    assert lib.cm_test_map(isa, op, ptr(dst, "void *"), ptr(src, "void *"), x.size) == 0
    return dst


def awkward_floats() -> np.ndarray:
    """Every exponent and sign with some mantissas, dense ranges where results change their nature, specials."""
    rng = np.random.default_rng(1)
    mantissas = np.concatenate([[0, 1, 0x400000, 0x7FFFFF, 0x1000, 0x0FFF, 0x1001], rng.integers(0, 1 << 23, 25)])
    bits = np.arange(512, dtype=np.uint32)[:, None] << 23 | mantissas.astype(np.uint32)
    ranges = [(-130, 130), (-127, -125), (127, 128.5), (-88, -86.5), (88, 89.5), (-1, 1)]
    dense = [rng.uniform(low, high, 3000).astype(np.float32) for low, high in ranges]
    halves = np.arange(-200, 200, 0.5, dtype=np.float32)
    return np.concatenate([bits.ravel().view(np.float32), *dense, halves, np.nextafter(halves, np.float32(-999))])


def test_lane_functions_agree(isa):
    x = awkward_floats()
    for op in (EXP2, EXP, SILU, GELU, TO_F16):
        assert same_bytes(apply(isa, op, x), apply(SCALAR, op, x)), op
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    assert same_bytes(apply(isa, FROM_F16, halves), apply(SCALAR, FROM_F16, halves))
    for n in range(1, 34):
        assert same_bytes(apply(isa, EXP2, x[:n]), apply(SCALAR, EXP2, x[:n]))


@pytest.mark.parametrize(("op", "function"), [(EXP2, np.exp2), (EXP, np.exp)])
def test_exponentials_within_a_unit_in_the_last_place(op, function):
    x = awkward_floats()
    got = apply(SCALAR, op, x)
    with np.errstate(all="ignore"):
        exact = function(x.astype(np.float64))
        nearest = exact.astype(np.float32)
    assert np.array_equal(np.isnan(got), np.isnan(x))
    normal = np.isfinite(nearest) & (nearest >= 2.0**-126) & np.isfinite(got) & (got > 0)
    assert np.max(np.abs(got[normal] - exact[normal]) / np.spacing(nearest[normal])) <= 1.0
    # Where one is not normal, both are at the same end of the range.
    edge = ~normal & ~np.isnan(x)
    assert np.all((got[edge] == 0) | (got[edge] == np.inf))
    assert np.all((got[edge] == 0) == (exact[edge] < 2.0**-125))
    assert not np.any((got > 0) & (got < 2.0**-126))


def test_exponentials_of_special_values():
    x = np.array([0, -0.0, np.inf, -np.inf, 128, -126, -126.00001, 1, -1e30, 1e30], np.float32)
    expected = [1, 1, np.inf, 0, np.inf, 2.0**-126, 0, 2, 0, np.inf]
    assert apply(SCALAR, EXP2, x).tolist() == expected
    assert apply(SCALAR, EXP, x)[[0, 1, 2, 3, 8, 9]].tolist() == [1, 1, np.inf, 0, 0, np.inf]


def test_silu():
    x = np.concatenate([np.linspace(-80, 80, 4001), [0.0, 1e-30, 1e30]]).astype(np.float32)
    exact = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
    assert np.allclose(apply(SCALAR, SILU, x), exact, rtol=4e-7, atol=1e-37)
    assert np.isnan(apply(SCALAR, SILU, np.array([np.nan], np.float32)))[0]


def test_gelu():
    x = np.concatenate([np.linspace(-9, 80, 4001), [0.0, 1e-30, 1e10]]).astype(np.float32)
    wide = x.astype(np.float64)
    exact = wide / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    # For negative x the exponent, which is rounded, is large.
    assert np.allclose(apply(SCALAR, GELU, x), exact, rtol=2e-5, atol=1e-37)
    assert np.allclose(apply(SCALAR, GELU, x[x > -3]), exact[x > -3], rtol=2e-6)
    assert np.isnan(apply(SCALAR, GELU, np.array([np.nan], np.float32)))[0]


def test_f16_conversion_is_ieee():
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    assert same_bytes(apply(SCALAR, FROM_F16, halves), halves.astype(np.float32))
    middles = (np.arange(0x7BFF, dtype=np.uint16).view(np.float16).astype(np.float64) + 0.0).astype(np.float32)
    middles = (middles[1:] + middles[:-1]) / 2  # exactly between two neighbours: ties to even
    bits = np.random.default_rng(2).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    edges = np.array([65504, 65519.996, 65520, 65536, 2.0**-24, 2.0**-25, 2.0**-26, 2.0**-14, np.inf], np.float32)
    x = np.concatenate([middles, np.nextafter(middles, np.float32(0)), edges, bits.view(np.float32)])
    x = np.concatenate([x, -x])
    with np.errstate(all="ignore"):
        assert same_bytes(apply(SCALAR, TO_F16, x), x.astype(np.float16))


# ---- norm ----


def rmsnorm(isa: int, x: np.ndarray, weight: np.ndarray, eps: float, begin: int, end: int) -> np.ndarray:
    dst = guarded(x.shape, np.float32, 7)
    src, w = guarded(x.shape, np.float32, x), guarded(weight.shape, np.float32, weight)
    width, stride = weight.size, x.shape[1]
    args = ptr(dst, "float *"), stride, ptr(src, "float *"), stride, ptr(w, "float *"), width, eps, begin, end
    assert lib.cm_test_rmsnorm(isa, *args) == 0
    return dst


@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 100, 576, 2048])
def test_rmsnorm(width):
    rng = np.random.default_rng(width)
    x = (rng.standard_normal((6, width)) * 3).astype(np.float32)
    weight = rng.standard_normal(width).astype(np.float32)
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    got = rmsnorm(SCALAR, x, weight, 1e-5, 0, 6)
    assert np.allclose(got, exact, rtol=2e-6, atol=1e-6)
    part = rmsnorm(SCALAR, x, weight, 1e-5, 2, 5)
    assert np.array_equal(part[2:5], got[2:5]) and np.all(part[[0, 1, 5]] == 7)


def test_rmsnorm_agrees(isa):
    rng = np.random.default_rng(3)
    for _ in range(60):
        rows, width = rng.integers(1, 12), rng.integers(1, 700)
        x = (rng.standard_normal((rows, width)) * 10.0 ** rng.integers(-20, 18)).astype(np.float32)
        weight = rng.standard_normal(width).astype(np.float32)
        begin = rng.integers(0, rows)
        got, expected = (rmsnorm(i, x, weight, 1e-6, begin, rows) for i in (isa, SCALAR))
        assert same_bytes(got, expected)


# ---- rotary positions ----


def rope(isa: int, row: np.ndarray, rot_dim: int, angles: np.ndarray, pairing: int) -> np.ndarray:
    """row: [heads][head_dim]; angles: [rot_dim / 2]."""
    out = guarded(row.shape, np.float32, row)
    cos, sin = (guarded(angles.shape, np.float32, f(angles)) for f in (np.cos, np.sin))
    args = ptr(out, "float *"), *row.shape, rot_dim, ptr(cos, "float *"), ptr(sin, "float *"), pairing
    assert lib.cm_test_rope(isa, *args) == 0
    return out


ROPE_SHAPES = [(64, 64), (16, 16), (128, 128), (80, 80), (80, 32), (96, 24), (24, 2), (40, 20), (256, 64)]


@pytest.mark.parametrize(("head_dim", "rot_dim"), ROPE_SHAPES)
@pytest.mark.parametrize("pairing", [0, 1])
def test_rope(head_dim, rot_dim, pairing):
    rng = np.random.default_rng(4)
    row = rng.standard_normal((3, head_dim)).astype(np.float32)
    angles = rng.uniform(-4, 4, rot_dim // 2).astype(np.float32)
    first = np.arange(0, rot_dim, 2) if pairing == 0 else np.arange(rot_dim // 2)
    second = first + (1 if pairing == 0 else rot_dim // 2)
    exact = row.astype(np.float64)
    turned = (exact[:, first] + 1j * exact[:, second]) * np.exp(1j * angles.astype(np.float64))
    exact[:, first], exact[:, second] = turned.real, turned.imag
    got = rope(SCALAR, row, rot_dim, angles, pairing)
    assert np.allclose(got, exact, atol=1e-6)
    assert np.array_equal(got[:, rot_dim:], row[:, rot_dim:])


def test_rope_agrees(isa):
    rng = np.random.default_rng(5)
    for head_dim, rot_dim in ROPE_SHAPES:
        for pairing in (0, 1):
            row = rng.standard_normal((rng.integers(1, 10), head_dim)).astype(np.float32)
            row[rng.random(row.shape) < 0.1] = -0.0
            angles = rng.uniform(-4, 4, rot_dim // 2).astype(np.float32)
            got, expected = (rope(i, row, rot_dim, angles, pairing) for i in (isa, SCALAR))
            assert same_bytes(got, expected), (head_dim, rot_dim, pairing)


# ---- softmax weights ----


def softmax(isa: int, logits: np.ndarray, inv_temp: float) -> tuple[np.ndarray, np.ndarray, float]:
    n = logits.size
    src, dst = guarded(n, np.float32, logits), guarded(n, np.float32, 7)
    sums, total = guarded(-(-n // 256), np.float32, 7), guarded(1, np.float32, 7)
    args = ptr(dst, "float *"), ptr(src, "float *"), n, float(logits.max()), inv_temp
    assert lib.cm_test_softmax_weights(isa, *args, ptr(sums, "float *"), ptr(total, "float *")) == 0
    return dst, sums, float(total[0])


@pytest.mark.parametrize("n", [1, 16, 255, 256, 257, 5000])
def test_softmax_weights(n):
    logits = (np.random.default_rng(n).standard_normal(n) * 8).astype(np.float32)
    if n > 20:
        logits[3] = -np.inf
    weights, sums, total = softmax(SCALAR, logits, 1.25)
    exact = np.exp((logits.astype(np.float64) - logits.max()) * 1.25)
    assert np.allclose(weights, exact, rtol=1e-5, atol=1e-37)
    assert np.allclose(sums, np.add.reduceat(exact, np.arange(0, n, 256)), rtol=1e-5)
    assert np.isclose(total, exact.sum(), rtol=1e-5)


def test_softmax_weights_agree(isa):
    rng = np.random.default_rng(6)
    for _ in range(40):
        logits = (rng.standard_normal(rng.integers(1, 3000)) * 10).astype(np.float32)
        inv_temp = float(np.float32(rng.choice([1.0, 0.1, 1 / 0.7, 50.0])))
        got, expected = (softmax(i, logits, inv_temp) for i in (isa, SCALAR))
        assert same_bytes(got[0], expected[0]) and same_bytes(got[1], expected[1]) and got[2] == expected[2]
