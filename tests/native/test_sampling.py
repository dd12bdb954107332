"""Tokens from logits: the generator's published answers, distributions, filters, and equal draws on all CPUs."""

import numpy as np
import pytest

from coremill.config.errors import ConfigError
from coremill.native import ffi, lib, select_isa

ISAS = [ffi.string(lib.cm_isa_name(i)).decode() for i in range(lib.cm_isa_count()) if lib.cm_isa_supported(i)]


@pytest.fixture(autouse=True)
def isa_restored():
    before = ffi.string(lib.cm_isa_active()).decode()
    yield
    select_isa(before)


def draw(logits, count=1, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=1, position=0) -> np.ndarray:
    logits = np.ascontiguousarray(logits, np.float32)
    sampling = ffi.new(
        "cm_sampling *",
        {"wanted": 1, "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed},
    )
    tokens, err = np.full(count, -1, np.int32), ffi.new("char[]", 200)
    rc = lib.cm_sample_logits(
        ffi.cast("float *", logits.ctypes.data),
        len(logits),
        sampling,
        position,
        count,
        ffi.cast("int32_t *", tokens.ctypes.data),
        err,
        len(err),
    )
    if rc < 0:
        raise ConfigError(ffi.string(err).decode())
    return tokens


def random_logits(n: int, spread: float = 2.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * spread).astype(np.float32)


def probabilities(logits, temperature=1.0) -> np.ndarray:
    scaled = np.asarray(logits, np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    return p / p.sum()


def kept_set(logits, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) -> set[int]:
    """The definition, written plainly: sort, cut three times."""
    p = probabilities(logits, temperature)
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if top_k:
        order = order[:top_k]
    share, kept, mass = sum(p[i] for i in order), [], 0.0
    for i in order:
        if kept and mass >= top_p * share:
            break
        kept.append(i)
        mass += p[i]
    return {i for i in kept if p[i] >= min_p * p[order[0]]}


def assert_distributed(tokens: np.ndarray, p: np.ndarray) -> None:
    """Pearson's chi-square, rare tokens taken together, against five standard deviations."""
    expected, seen = p * len(tokens), np.bincount(tokens, minlength=len(p)).astype(float)
    assert not seen[p == 0].any()
    rare = expected < 10
    cells = [*zip(expected[~rare], seen[~rare], strict=True), (expected[rare].sum(), seen[rare].sum())]
    chi = sum((s - e) ** 2 / e for e, s in cells if e > 0)
    free = len([e for e, _ in cells if e > 0]) - 1
    assert chi < free + 5 * (2 * free) ** 0.5 + 5, (chi, free)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, answer):
    out = ffi.new("uint32_t[4]")
    lib.cm_philox4x32(ffi.new("uint32_t[4]", counter), ffi.new("uint32_t[2]", key), out)
    assert tuple(out) == answer


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("n", [1, 2, 50, 256, 257, 2000])
def test_the_whole_vocabulary_is_drawn_by_its_probabilities(n, temperature):
    logits = random_logits(n)
    assert_distributed(draw(logits, 20000, temperature=temperature), probabilities(logits, temperature))


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"top_p": 0.5},
    {"top_p": 0.97},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7},
    {"top_p": 0.95, "min_p": 0.02, "temperature": 1.5},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("n", [1, 60, 1000])
def test_filters_keep_the_right_tokens_in_the_right_shares(n, options):
    logits = random_logits(n, seed=n)
    kept = kept_set(logits, **options)
    p = probabilities(logits, options.get("temperature", 1.0))
    p[[i for i in range(n) if i not in kept]] = 0
    assert_distributed(draw(logits, 20000, **options), p / p.sum())


def test_of_equals_the_lowest_ids_are_kept():
    logits = np.zeros(1000, np.float32)
    logits[[3, 500]] = 2.0
    assert set(draw(logits, 3000, top_k=4)) == {3, 500, 0, 1}
    assert set(draw(np.zeros(10), 500, top_p=0.3)) == {0, 1, 2}
    assert set(draw(np.zeros(10), 2000, min_p=1.0)) == set(range(10))


def test_cold_and_greedy():
    logits = random_logits(5000)
    logits[[77, 4000]] = logits.max() + 1
    assert draw(logits, temperature=0.0).item() == 77
    assert set(draw(logits, 200, temperature=1e-30)) == {77, 4000}
    hot = draw(logits, 20000, temperature=1e6)
    assert_distributed(hot, np.full(5000, 1 / 5000))
    far = np.full(300, -3e38, np.float32)
    far[123] = 3e38
    assert set(draw(far, 50)) == {123}


@pytest.mark.parametrize("n", [49152, 262144])
def test_large_vocabularies(n):
    logits = random_logits(n, 3.0)
    kept = kept_set(logits, top_p=0.9)
    tokens = draw(logits, 100, top_p=0.9)
    assert set(tokens) <= kept
    assert len(set(draw(logits, 100))) > 20


@pytest.mark.parametrize("options", [{}, *FILTERS], ids=str)
def test_every_instruction_set_draws_the_same(options):
    logits = random_logits(49152, 2.5)
    drawn = []
    for isa in ISAS:
        select_isa(isa)
        drawn.append(draw(logits, 20, **options).tobytes())
    assert len(set(drawn)) == 1


def test_a_draw_depends_on_seed_and_position_alone():
    logits = random_logits(1000)
    row = draw(logits, 50, seed=9, position=100)
    assert (row == [draw(logits, seed=9, position=100 + i).item() for i in range(50)]).all()
    assert (row != draw(logits, 50, seed=10, position=100)).any()
    assert (row[1:] != row[:-1]).any()
    # All 64 bits of a seed count, as do positions beyond 32.
    tokens = {draw(logits, 20, seed=s, position=p).tobytes() for s in (1, 1 + (1 << 32), 1 << 63) for p in (0, 1 << 33)}
    assert len(tokens) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"position": -1}, "position"),
    ],
)
def test_parameters_out_of_range(options, message):
    with pytest.raises(ConfigError, match=message):
        draw([0.0, 1.0], **options)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite(bad):
    with pytest.raises(ConfigError, match="not finite"):
        draw([0.0, bad, 1.0])
