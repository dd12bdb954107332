"""Rotary frequencies against the published formulas, and angles against exact values."""

import math

import numpy as np
import pytest

from coremill.config.errors import UnsupportedModelError
from coremill.config.model import RopeSpec
from coremill.native import ffi, lib
from coremill.worker.rotary import inverse_frequencies, magnitude


def rope(**changes) -> RopeSpec:
    return RopeSpec(**{"pairing": "norm", "dim": 64, "theta": 10000.0, **changes})


def test_plain_and_linear():
    expected = [10000.0 ** (-2 * i / 64) for i in range(32)]
    assert np.allclose(inverse_frequencies(rope()), expected, rtol=1e-14)
    linear = inverse_frequencies(rope(scaling="linear", factor=8.0))
    assert np.allclose(linear, np.array(expected) / 8, rtol=1e-14)
    assert magnitude(rope()) == magnitude(rope(scaling="linear", factor=8.0)) == 1.0
    assert inverse_frequencies(rope(theta=1.0)) == [1.0] * 32


def test_llama3_divides_by_the_models_factors():
    factors = [1.0] * 10 + [2.5] * 12 + [32.0] * 10
    spec = rope(theta=500000.0, scaling="llama3", has_factors=True)
    expected = [500000.0 ** (-2 * i / 64) / f for i, f in enumerate(factors)]
    assert np.allclose(inverse_frequencies(spec, factors), expected, rtol=1e-14)
    for bad in (None, factors[:-1], [0.0] * 32, [math.nan] * 32, [math.inf] * 32, [0.5] * 32):
        with pytest.raises(UnsupportedModelError, match="rope_factors"):
            inverse_frequencies(spec, bad)


@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
@pytest.mark.parametrize("factor", [1.0, 4.0, 16.0])
def test_yarn(theta, factor):
    """The formulas as transformers and llama.cpp have them: a ramp over pairs between two corrected dimensions."""
    spec = rope(dim=128, theta=theta, scaling="yarn", factor=factor, original_context=4096)

    def corrected(turns: float) -> float:
        return 128 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(corrected(32)), 0), min(math.ceil(corrected(1)), 127)
    ramp = np.clip((np.arange(64) - low) / max(high - low, 0.001), 0, 1)
    plain = theta ** (-2.0 * np.arange(64) / 128)
    assert np.allclose(inverse_frequencies(spec), plain / factor * ramp + plain * (1 - ramp), rtol=1e-12)
    assert math.isclose(magnitude(spec), 1.0 if factor == 1.0 else 0.1 * math.log(factor) + 1)
    scaled = rope(scaling="yarn", factor=2.0, original_context=1, attn_factor=3.0)
    assert math.isclose(magnitude(scaled), 3.0 * (0.1 * math.log(2) + 1))


def test_yarn_when_the_ramp_has_no_width():
    spec = rope(scaling="yarn", factor=4.0, original_context=4096, beta_fast=1.0, beta_slow=1.0)
    assert all(0 < f <= 1 for f in inverse_frequencies(spec))
    with pytest.raises(UnsupportedModelError, match="freq_base"):
        inverse_frequencies(rope(theta=1.0, scaling="yarn", factor=4.0, original_context=4096))


def test_frequencies_are_rounded_once():
    """Decimal arithmetic at 40 digits: an exact case and one known to more digits than a double has."""
    assert inverse_frequencies(rope(theta=2.0**32, dim=64)) == [2.0**-i for i in range(32)]
    assert inverse_frequencies(rope(theta=10000.0, dim=64))[1] == 0.7498942093324559


def row(inv_freq, position, scale=1.0):
    half = len(inv_freq)
    cos, sin = ffi.new("float[]", half), ffi.new("float[]", half)
    lib.cm_rope_row(cos, sin, ffi.new("double[]", inv_freq), half, scale, position)
    return np.array(list(cos)), np.array(list(sin))


def test_angles_near_and_far():
    rng = np.random.default_rng(3)
    for limit in (1, 100, 10000, 1 << 20, 1 << 30):
        inv_freq = [1.0, 0.5, *rng.random(100).tolist()]
        for position in (0, 1, *rng.integers(0, limit, 50).tolist(), limit):
            cos, sin = row(inv_freq, position)
            angles = np.array([position * f for f in inv_freq])
            assert np.abs(cos - np.cos(angles)).max() < 1e-7
            assert np.abs(sin - np.sin(angles)).max() < 1e-7


def test_angles_are_correctly_rounded_where_it_is_easy_to_say():
    cos, sin = row([1.0, 0.0], 0)
    assert list(cos) == [1.0, 1.0] and list(sin) == [0.0, 0.0]
    cos, sin = row([1.0], 355)  # 355 is 113 pi less 3.0e-5
    assert sin[0] == np.float32(-3.014435335948845e-05) and cos[0] == np.float32(-0.9999999995456589)
    cos, sin = row([1.0], 1, scale=2.0)
    assert cos[0] == np.float32(2 * math.cos(1)) and sin[0] == np.float32(2 * math.sin(1))
