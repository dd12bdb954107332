"""Frequencies of rotary position embedding, in decimal arithmetic: the same numbers on every machine.

Dimension pair i of `dim` turns by position * f_i, where f_i = theta ** (-2 i / dim) before scaling:

    linear   f_i / factor (Chen et al., "Extending context window by positional interpolation")
    llama3   f_i / rope_factors[i]; the divisors come with the model
    yarn     Peng et al., "YaRN", section 3.2 and 3.4: pairs that turn often keep f_i, pairs that turn rarely
             get f_i / factor, with a linear ramp between; cos and sin times 0.1 ln(factor) + 1
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, localcontext

from coremill.config.errors import UnsupportedModelError
from coremill.config.model import RopeSpec

_PRECISION = Context(prec=40)
_PI = Decimal("3.141592653589793238462643383279502884197")


def inverse_frequencies(rope: RopeSpec, factors: Sequence[float] | None = None) -> list[float]:
    """f_i of every pair, rounded to double once.

    Args:
        factors: the pack's vector `rope_factors` when `rope.has_factors`.

    Raises:
        UnsupportedModelError: a divisor is not a positive number.
    """
    with localcontext(_PRECISION):
        theta, dim, factor = Decimal(rope.theta), rope.dim, Decimal(rope.factor)
        step = (theta.ln() * -2 / dim).exp()
        plain = [step**i for i in range(dim // 2)]
        if rope.has_factors:
            return [float(f / divisor) for f, divisor in zip(plain, _divisors(rope, factors), strict=True)]
        if rope.scaling == "linear":
            return [float(f / factor) for f in plain]
        if rope.scaling == "yarn":
            ramp = _yarn_ramp(rope)
            return [float(f * (1 - r) + f / factor * r) for f, r in zip(plain, ramp, strict=True)]
        return [float(f) for f in plain]


def magnitude(rope: RopeSpec) -> float:
    """What cos and sin are multiplied with."""
    with localcontext(_PRECISION):
        scale = Decimal(rope.attn_factor)
        if rope.scaling == "yarn" and rope.factor > 1:
            scale *= Decimal("0.1") * Decimal(rope.factor).ln() + 1
        return float(scale)


def _divisors(rope: RopeSpec, factors: Sequence[float] | None) -> list[Decimal]:
    if factors is None or len(factors) != rope.dim // 2:
        raise UnsupportedModelError(f"rope_factors: the model needs {rope.dim // 2} divisors of its frequencies")
    for i, divisor in enumerate(factors):
        # Divisors below 1 would turn a pair by more than its position, beyond what C accepts.
        if not 1 <= divisor < float("inf"):
            raise UnsupportedModelError(f"rope_factors[{i}] is {divisor}, not a number of at least 1")
    return [Decimal(divisor) for divisor in factors]


def _yarn_ramp(rope: RopeSpec) -> list[Decimal]:
    """0 where a pair keeps its frequency, 1 where it is interpolated."""
    if rope.theta <= 1:
        raise UnsupportedModelError(f"rope.freq_base {rope.theta} leaves no frequencies for YaRN to choose from")
    low = max(_pair_of_turns(rope, rope.beta_fast).to_integral_value(ROUND_FLOOR), Decimal(0))
    high = min(_pair_of_turns(rope, rope.beta_slow).to_integral_value(ROUND_CEILING), Decimal(rope.dim - 1))
    span = max(high - low, Decimal("0.001"))
    return [min(max((i - low) / span, Decimal(0)), Decimal(1)) for i in range(rope.dim // 2)]


def _pair_of_turns(rope: RopeSpec, turns: float) -> Decimal:
    """The (fractional) pair that makes so many turns over the original context."""
    ratio = Decimal(rope.original_context) / (Decimal(turns) * 2 * _PI)
    return rope.dim * ratio.ln() / (2 * Decimal(rope.theta).ln())
