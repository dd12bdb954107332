"""Descriptions of models: read from metadata, checked, refused by the name of the key."""

import math
from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest

from coremill.config.errors import UnsupportedModelError
from coremill.config.layout import MatrixRule, all_rules, layout
from coremill.config.model import ModelSpec, RopeSpec

BASE = {
    "general.architecture": "llama",
    "general.name": "Test",
    "llama.block_count": 2,
    "llama.context_length": 2048,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 100,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def tensors_of(spec: ModelSpec, *, optional: bool = False) -> dict:
    """Shapes of the tensors that a model of this description has."""
    found = {}
    for rule in all_rules(spec):
        if not getattr(rule, "optional", False) or optional:
            for part in rule.parts:
                shape = (rule.k, part.rows) if isinstance(rule, MatrixRule) else (part.rows,)
                found[part.source] = SimpleNamespace(shape=shape, format=0)
    return found


def read(changes: dict | None = None, *, tensors: dict | None = None, **more) -> ModelSpec:
    metadata = BASE | {f"llama.{key}": value for key, value in (changes or {}).items()} | more
    metadata = {key: value for key, value in metadata.items() if value is not None}
    embedding = {"token_embd.weight": SimpleNamespace(shape=(64, 321), format=0)}
    return ModelSpec.from_gguf(metadata, embedding | (tensors or {}))


def test_defaults_are_those_of_the_format():
    spec = read()
    assert (spec.num_kv_heads, spec.head_dim, spec.vocab_size, spec.tied_output) == (4, 16, 321, True)
    assert spec.rope == RopeSpec("norm", 16, 10000.0, original_context=2048)
    assert spec.license is None and spec.embedding_scale == 1.0
    assert not read(tensors={"output.weight": None}).tied_output


def test_round_trip():
    spec = read({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0})
    assert ModelSpec.from_dict(spec.to_dict()) == spec


def test_explicit_head_sizes():
    spec = read({"attention.key_length": 24, "attention.value_length": 24, "rope.dimension_count": 8})
    assert spec.head_dim == 24 and spec.rope.dim == 8


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ("none", 1.0)),
        ({"rope.scale_linear": 4.0}, ("linear", 4.0)),
        ({"rope.scaling.factor": 2.0}, ("linear", 2.0)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, ("linear", 8.0)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 8.0}, ("none", 1.0)),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}, ("yarn", 8.0)),
    ],
)
def test_rope_scaling(keys, expected):
    rope = read(keys).rope
    assert (rope.scaling, rope.factor) == expected and not rope.has_factors


def test_llama3_factors():
    factors = {"rope_freqs.weight": SimpleNamespace(shape=(8,), format=0)}
    rope = read(tensors=factors).rope
    assert rope.scaling == "llama3" and rope.has_factors and rope.factor == 1.0
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        read({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, tensors=factors)


def test_values_per_layer_that_agree_are_one_value():
    assert read({"attention.head_count_kv": [2, 2]}).num_kv_heads == 2
    with pytest.raises(UnsupportedModelError, match="head_count_kv differs between layers"):
        read({"attention.head_count_kv": [2, 4]})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("block_count", None, "missing"),
        ("context_length", None, "missing"),
        ("attention.layer_norm_rms_epsilon", None, "missing"),
        ("block_count", 0, "is 0"),
        ("block_count", 1 << 40, "not a whole number"),
        ("block_count", True, "True"),
        ("embedding_length", 65, "not a multiple"),
        ("embedding_length", "64", "'64'"),
        ("attention.head_count_kv", 3, "not a multiple"),
        ("attention.head_count_kv", 8, "not a whole number of 1 to 4"),
        ("attention.value_length", 8, "differs from key_length"),
        ("attention.layer_norm_rms_epsilon", math.nan, "nan"),
        ("rope.dimension_count", 7, "even"),
        ("rope.dimension_count", 18, "2 to 16"),
        ("rope.freq_base", math.inf, "inf"),
        ("rope.freq_base", 0.0, "0.0"),
        ("rope.scaling.type", "longrope", "longrope"),
        ("expert_count", 8, "mixture of experts"),
        ("attention.sliding_window", -1, "-1"),
        ("attention.causal", False, "causal"),
        ("logit_scale", 0.25, "not supported"),
        ("final_logit_softcapping", 30.0, "not supported"),
        ("tensor_data_layout", "jploski", "'jploski', which is not supported"),
    ],
)
def test_refusals_name_the_key(key, value, words):
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        read({key: value})
    assert f"llama.{key}" in str(caught.value)


class Seen(dict):
    """Metadata that remembers which keys were asked for."""

    def __init__(self, values):
        super().__init__(values)
        self.keys_read = set()

    def get(self, key, default=None):
        self.keys_read.add(key)
        return super().get(key, default)


EMBEDDING = {"token_embd.weight": SimpleNamespace(shape=(64, 321), format=0)}


def keys_that_are_read() -> list[str]:
    seen = Seen(BASE)
    ModelSpec.from_gguf(seen, EMBEDDING)
    return sorted(seen.keys_read)


# What no key may be, whatever its type.
STRANGERS = [
    b"x",
    [],
    [[2, 2]],
    [[2], [3]],
    ["x", "y"],
    [array("I", [2])],
    array("d"),
    array("I", [2, 3]),
    ["x" * 999] * 999,
]
TEXTS = {"general.architecture", "general.name", "general.license", "general.type"}
TEXTS |= {"llama.rope.scaling.type", "llama.tensor_data_layout"}
FLAGS = {"llama.attention.causal", "llama.use_parallel_residual"}
FRACTIONS = ("scale", "bias", "clamp_kqv", "softcapping", "epsilon", "freq_base", "factor", "linear", "multiplier")
FRACTIONS += ("beta_fast", "beta_slow")


@pytest.mark.parametrize("key", keys_that_are_read())
def test_no_key_is_taken_in_another_type(key):
    wrong = list(STRANGERS)
    if key == "tokenizer.ggml.tokens":
        wrong += [7, 2.5, True, "x" * 321, array("I", [1] * 321)]
    elif key in TEXTS:
        wrong += [7, 2.5, True]
    else:
        wrong += ["2", "x" * 999, *([0, 1, 2.5] if key in FLAGS else [True, False])]
        wrong += [] if key in FLAGS or key.endswith(FRACTIONS) or key == "llama.expert_count" else [2.0, 64.0]
    for value in wrong:
        with pytest.raises(UnsupportedModelError) as caught:
            ModelSpec.from_gguf(BASE | {key: value}, EMBEDDING)
        assert key in str(caught.value) and len(str(caught.value)) < 300


def test_values_that_change_nothing_are_accepted():
    neutral = {"expert_count": 0, "logit_scale": 1.0, "attention.sliding_window": 4096, "attention.causal": True}
    assert read(neutral) == read()
    assert read({"tensor_data_layout": "Meta AI original pth"}) == read()
    assert read(**{"general.type": "model", "general.quantization_version": 2}) == read()


def test_refusals_without_a_key():
    with pytest.raises(UnsupportedModelError, match=r"general\.type is 'adapter': only .* whole models"):
        read(**{"general.type": "adapter"})
    with pytest.raises(UnsupportedModelError, match=r"general\.quantization_version is 99; only 2"):
        read(**{"general.quantization_version": 99})
    with pytest.raises(UnsupportedModelError, match="'gpt-j' is not supported; supported: gemma, gemma3, llama"):
        read(**{"general.architecture": "gpt-j"})
    with pytest.raises(UnsupportedModelError, match=r"general\.architecture is missing"):
        read(**{"general.architecture": None})
    with pytest.raises(UnsupportedModelError, match=r"has 320 entries, but .* has 321 rows"):
        read(**{"tokenizer.ggml.tokens": ["x"] * 320})
    with pytest.raises(UnsupportedModelError, match=r"'token_embd\.weight' is missing"):
        ModelSpec.from_gguf(BASE, {})


@pytest.mark.parametrize(
    "change",
    [{"num_heads": 0}, {"num_kv_heads": 3}, {"vocab_size": 1 << 30}, {"norm_eps": math.nan}, {"head_dim": 8}],
)
def test_no_inconsistent_description_exists(change):
    with pytest.raises(UnsupportedModelError, match=next(iter(change)) if "head_dim" not in change else "rope.dim"):
        replace(read(), **change)


# ---- layout ----


def test_layout_uses_every_tensor():
    spec = read({"attention.head_count_kv": 2}, tensors={"output.weight": None})
    rules = {rule.name: rule for rule in layout(spec, tensors_of(spec))}
    assert list(rules)[:3] == ["token_embd", "blk.0.attn_norm", "blk.0.attn_qkv"] and "output" in rules
    assert not [name for name in rules if name.endswith(".bias")]
    qkv, gate_up = rules["blk.1.attn_qkv"], rules["blk.1.ffn_gate_up"]
    assert (qkv.n, qkv.k, qkv.num_panels, [qkv.first_row(i) for i in range(3)]) == (128, 64, 8, [0, 64, 96])
    assert [qkv.panel_source(i) for i in (0, 3, 4, 7)] == [(0, 0), (0, 3), (1, 0), (2, 1)]
    assert (gate_up.n, gate_up.num_panels, gate_up.first_row(1)) == (224, 14, 16)  # 100 rows are 7 panels
    assert [gate_up.panel_source(i) for i in (0, 1, 12, 13)] == [(0, 0), (1, 0), (0, 6), (1, 6)]
    with pytest.raises(IndexError):
        qkv.panel_source(8)


def test_biases_are_fused_like_their_matrices():
    spec = read()
    found = tensors_of(spec, optional=True)
    del found["blk.0.attn_k.bias"]
    rules = {rule.name: rule for rule in layout(spec, found)}
    assert rules["blk.0.attn_qkv.bias"].length == 192 == rules["blk.1.attn_qkv.bias"].length
    assert rules["blk.0.ffn_gate_up.bias"].length == 16 * 14


def test_harmless_leftovers_of_old_converters():
    spec = read()
    extra = {"blk.0.attn_rot_embd": SimpleNamespace(shape=(8,), format=0)}
    assert layout(spec, tensors_of(spec) | extra) == layout(spec, tensors_of(spec))
