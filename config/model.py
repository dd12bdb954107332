"""What a model is, apart from its weights: the numbers that shape its plan, its cache and its packed layout.

A description is read once from the metadata of a model file, checked as a whole, and then travels in
the pack file. Whatever coremill would compute wrongly is refused here, by the name of the key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from coremill.config.errors import UnsupportedModelError
from coremill.config.model_keys import Keys, is_array, is_number, shown

# Above these a file is nonsense rather than large; they keep every product of sizes far below 2**63.
MAX_WIDTH = 1 << 20
MAX_LAYERS = 1 << 12
MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 30

# `general.quantization_version` of the block formats as they are read here.
_QUANTIZATION = 2


class TensorShape(Protocol):
    """What this module and the layout need to know of a tensor in a file."""

    shape: tuple[int, ...]
    format: int


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding.

    Attributes:
        pairing: "norm" rotates elements (2i, 2i+1), "neox" rotates (i, i + dim/2).
        dim: elements of a head that are rotated, an even number <= head_dim.
        theta: base of the frequencies, theta**(-2i/dim).
        scaling: "none"; "linear": frequencies / factor; "llama3": frequencies / the vector `rope_factors`
            of the pack; "yarn": the ramp between beta_fast and beta_slow of the YaRN paper.
        factor: context extension factor of "linear" and "yarn", 1.0 otherwise.
        original_context: context length the model was first trained for ("yarn").
        attn_factor: multiplies cos and sin on top of what the scaling itself asks for.
        has_factors: the pack has a vector `rope_factors` of dim/2 divisors.
    """

    pairing: str
    dim: int
    theta: float
    scaling: str = "none"
    factor: float = 1.0
    original_context: int = 0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    has_factors: bool = False

    def __post_init__(self) -> None:
        _require(self.pairing in ("norm", "neox"), "rope.pairing", self.pairing)
        _require(self.scaling in ("none", "linear", "llama3", "yarn"), "rope.scaling", self.scaling)
        _require(2 <= self.dim <= MAX_WIDTH and self.dim % 2 == 0, "rope.dim", self.dim)
        _require(0 <= self.original_context <= MAX_CONTEXT, "rope.original_context", self.original_context)
        for name in ("theta", "factor", "attn_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            _require(math.isfinite(value) and 0 < value <= 1e12, f"rope.{name}", value)
        _require(self.has_factors or self.scaling != "llama3", "rope.has_factors", self.has_factors)
        _require(self.original_context > 0 or self.scaling != "yarn", "rope.original_context", 0)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only model. All sizes are in elements; `norm_eps` belongs under the square root.

    Every instance is consistent: sizes are positive and bounded, heads divide evenly over KV heads.

    Attributes:
        activation: of the gate in feed-forward: "silu", or "gelu" (by tanh).
        head_norms: queries and keys are normalised, head by head, before they are rotated.
        branch_norms: what attention and feed-forward give is normalised before it is added.
        sliding_window: positions that a row of a local layer sees, its own included; 0: there are no local layers.
        global_every: every so manieth layer is global, the others are local; 0: all are local, if there is a window.
        local_theta: base of the rotary frequencies of local layers, which know no scaling; 0.0: as in global ones.
    """

    architecture: str
    name: str
    license: str | None
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: RopeSpec
    tied_output: bool
    embedding_scale: float = 1.0
    activation: str = "silu"
    head_norms: bool = False
    branch_norms: bool = False
    sliding_window: int = 0
    global_every: int = 0
    local_theta: float = 0.0

    def __post_init__(self) -> None:
        limits = {
            "num_layers": MAX_LAYERS,
            "hidden_size": MAX_WIDTH,
            "num_heads": MAX_WIDTH,
            "num_kv_heads": self.num_heads,
            "head_dim": MAX_WIDTH,
            "ffn_size": MAX_WIDTH,
            "vocab_size": MAX_VOCAB,
            "context_length": MAX_CONTEXT,
        }
        for name, limit in limits.items():
            _require(1 <= getattr(self, name) <= limit, name, getattr(self, name))
        _require(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", self.num_kv_heads)
        _require(self.num_heads * self.head_dim <= MAX_WIDTH, "head_dim", self.head_dim)
        _require(self.rope.dim <= self.head_dim, "rope.dim", self.rope.dim)
        _require(math.isfinite(self.norm_eps) and 0 <= self.norm_eps <= 1, "norm_eps", self.norm_eps)
        _require(math.isfinite(self.embedding_scale), "embedding_scale", self.embedding_scale)
        _require(self.activation in ("silu", "gelu"), "activation", self.activation)
        _require(0 <= self.sliding_window <= MAX_CONTEXT, "sliding_window", self.sliding_window)
        _require(0 <= self.global_every <= MAX_LAYERS, "global_every", self.global_every)
        _require(self.local_theta == 0 or 1 <= self.local_theta <= 1e12, "local_theta", self.local_theta)

    @property
    def local_rope(self) -> RopeSpec | None:
        """Rotary positions of local layers, where they differ from those of the others."""
        return RopeSpec(self.rope.pairing, self.rope.dim, self.local_theta) if self.local_theta else None

    def is_local(self, layer: int) -> bool:
        """Whether rows of this layer see `sliding_window` positions only."""
        return self.sliding_window > 0 and not (self.global_every and (layer + 1) % self.global_every == 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for msgpack and JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelSpec:
        """The inverse of `to_dict`. Raises UnsupportedModelError when the values describe no model."""
        return _from_dict(cls, values)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Mapping[str, TensorShape]) -> ModelSpec:
        """Read and check the description in a GGUF file's metadata.

        Raises:
            UnsupportedModelError: the architecture is unknown, a key is missing or out of range, or the
                model needs an operation coremill lacks; the message names the key and its value.
        """
        _refuse_other_files(metadata)
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str):
            found = "missing" if architecture is None else shown(architecture)
            raise UnsupportedModelError(f"general.architecture is {found}: this is not a language model file")
        if architecture not in _FAMILIES:
            known = ", ".join(sorted(_FAMILIES))
            raise UnsupportedModelError(f"general.architecture '{architecture}' is not supported; supported: {known}")
        return _from_keys(Keys(metadata, architecture), tensors)


def _refuse_other_files(metadata: Mapping[str, Any]) -> None:
    """Files that hold something else than a model, or its blocks in another form than this version reads."""
    kind, version = metadata.get("general.type", "model"), metadata.get("general.quantization_version", _QUANTIZATION)
    if kind != "model":
        raise UnsupportedModelError(
            f"general.type is {shown(kind)}: only files of whole models ('model') are supported"
        )
    if type(version) is not int or version != _QUANTIZATION:
        raise UnsupportedModelError(
            f"general.quantization_version is {shown(version)}; only {_QUANTIZATION} is supported"
        )


def _require(condition: bool, field: str, value: Any) -> None:
    if not condition:
        raise UnsupportedModelError(f"model description: {field} is {value!r}, which no model can have")


# Keys that change what a llama-like model computes, and the value at which they change nothing.
_NEUTRAL: dict[str, float] = {
    "expert_count": 0,
    "attention.scale": 0.0,
    "attention.causal": True,
    "attention.max_alibi_bias": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.temperature_scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "use_parallel_residual": False,
}

# `tensor_data_layout`: how the rows of q and k are ordered. Both names mean what rope's pairing "norm" expects.
_ROW_ORDERS = ("reference", "Meta AI original pth")


def _refuse_unknown_operations(keys: Keys) -> None:
    for key, neutral in _NEUTRAL.items():
        value = keys.get(key)
        if value is None:
            continue
        if not (isinstance(value, bool) if isinstance(neutral, bool) else is_number(value)):
            kind = "true or false" if isinstance(neutral, bool) else "a number"
            raise UnsupportedModelError(f"{keys.full(key)} is {shown(value)}, not {kind}")
        if value != neutral and value != 0:
            what = "a mixture of experts" if key == "expert_count" else "this"
            raise UnsupportedModelError(f"{keys.full(key)} is {value!r}: {what} is not supported")
    order = keys.get("tensor_data_layout")
    if order not in (None, *_ROW_ORDERS):
        raise UnsupportedModelError(f"{keys.full('tensor_data_layout')} is {shown(order)}, which is not supported")
    if keys.get("attention.causal") is False:
        raise UnsupportedModelError(f"{keys.full('attention.causal')} is false: only causal models generate text")


def _from_keys(keys: Keys, tensors: Mapping[str, TensorShape]) -> ModelSpec:
    _refuse_unknown_operations(keys)
    context = keys.integer("context_length", 1, MAX_CONTEXT)
    hidden = keys.integer("embedding_length", 1, MAX_WIDTH)
    heads = keys.integer("attention.head_count", 1, MAX_WIDTH)
    kv_heads = keys.integer("attention.head_count_kv", 1, heads, default=heads)
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"{keys.full('attention.head_count')} {heads} is not a multiple of "
            f"{keys.full('attention.head_count_kv')} {kv_heads}"
        )
    head_dim = _head_dim(keys, hidden, heads)
    metadata = keys.metadata
    return ModelSpec(
        architecture=keys.architecture,
        name=_text(metadata, "general.name") or "unnamed",
        license=_text(metadata, "general.license"),
        num_layers=keys.integer("block_count", 1, MAX_LAYERS),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=keys.integer("feed_forward_length", 1, MAX_WIDTH),
        vocab_size=_vocab_size(keys, tensors),
        context_length=context,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        rope=_rope(keys, _PAIRINGS[keys.architecture], head_dim, context, tensors),
        tied_output="output.weight" not in tensors,
        **_FAMILIES[keys.architecture](keys, hidden, context),
    )


def _llama_family(keys: Keys, hidden: int, context: int) -> dict[str, Any]:
    return {"sliding_window": _window(keys, context)}


def _qwen3_family(keys: Keys, hidden: int, context: int) -> dict[str, Any]:
    return {"sliding_window": _window(keys, context), "head_norms": True}


def _gemma_family(keys: Keys, hidden: int, context: int) -> dict[str, Any]:
    return {"embedding_scale": math.sqrt(hidden), "activation": "gelu"}


def _gemma3_family(keys: Keys, hidden: int, context: int) -> dict[str, Any]:
    """Five layers of six are local; files say neither that nor the base of their positions, as all models have it."""
    window = keys.integer("attention.sliding_window", 1, MAX_CONTEXT)
    local = {"sliding_window": window, "global_every": 6, "local_theta": 10000.0} if window < context else {}
    return _gemma_family(keys, hidden, context) | local | {"head_norms": True, "branch_norms": True}


def _window(keys: Keys, context: int) -> int:
    """Of all layers; 0 when it hides nothing."""
    window = keys.integer("attention.sliding_window", 0, 2**64 - 1, default=0)
    return window if window < context else 0


def _head_dim(keys: Keys, hidden: int, heads: int) -> int:
    if keys.get("attention.key_length") is None and hidden % heads:
        raise UnsupportedModelError(
            f"{keys.full('embedding_length')} {hidden} is not a multiple of {keys.full('attention.head_count')} {heads}"
        )
    head_dim = keys.integer("attention.key_length", 1, MAX_WIDTH, default=hidden // heads)
    value_dim = keys.integer("attention.value_length", 1, MAX_WIDTH, default=head_dim)
    if value_dim != head_dim:
        raise UnsupportedModelError(
            f"{keys.full('attention.value_length')} {value_dim} differs from key_length {head_dim}, "
            "which is not supported"
        )
    if head_dim * heads > MAX_WIDTH:
        raise UnsupportedModelError(f"{heads} heads of {head_dim} are more than {MAX_WIDTH} wide")
    return head_dim


def _vocab_size(keys: Keys, tensors: Mapping[str, TensorShape]) -> int:
    """Rows of the embedding, which is what the kernels gather from; the token list must agree."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise UnsupportedModelError("tensor 'token_embd.weight' is missing")
    if len(embedding.shape) != 2 or not 1 <= embedding.shape[1] <= MAX_VOCAB:
        raise UnsupportedModelError(
            f"tensor 'token_embd.weight' has shape {embedding.shape}, not (hidden, 1 to {MAX_VOCAB})"
        )
    vocab = embedding.shape[1]
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return vocab
    # The elements of an array in a file are all of one type.
    if not is_array(tokens) or not all(isinstance(token, str) for token in tokens[:1]):
        raise UnsupportedModelError(f"tokenizer.ggml.tokens is {shown(tokens)}, not an array of strings")
    if len(tokens) != vocab:
        raise UnsupportedModelError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries, but 'token_embd.weight' has {vocab} rows"
        )
    return vocab


def _rope(keys: Keys, pairing: str, head_dim: int, context: int, tensors: Mapping[str, TensorShape]) -> RopeSpec:
    dim = keys.integer("rope.dimension_count", 2, head_dim, default=head_dim)
    if dim % 2:
        raise UnsupportedModelError(f"{keys.full('rope.dimension_count')} is {dim}, not an even number")
    # Files older than `rope.scaling.*` have one linear factor under another name; 0 means none there.
    factor = keys.number("rope.scaling.factor", 0.0, 1e6, keys.number("rope.scale_linear", 0.0, 1e6, 0.0)) or 1.0
    scaling = keys.get("rope.scaling.type")
    if scaling is None:
        scaling = "linear" if factor != 1.0 else "none"
    if scaling not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(f"{keys.full('rope.scaling.type')} {shown(scaling)} is not supported")
    if keys.number("rope.scaling.yarn_log_multiplier", 0.0, 1e6, 0.0):
        raise UnsupportedModelError(f"{keys.full('rope.scaling.yarn_log_multiplier')} is not supported")
    # Llama 3 files carry the ready divisors as a tensor and no scaling type.
    has_factors = "rope_freqs.weight" in tensors
    if has_factors:
        if scaling == "yarn" or (scaling == "linear" and factor != 1.0):
            raise UnsupportedModelError(
                f"tensor 'rope_freqs.weight' together with '{scaling}' scaling is not supported"
            )
        scaling = "llama3"
    return RopeSpec(
        pairing=pairing,
        dim=dim,
        theta=keys.number("rope.freq_base", 1.0, 1e12, 10000.0),
        scaling=scaling,
        factor=factor if scaling in ("linear", "yarn") else 1.0,
        original_context=keys.integer("rope.scaling.original_context_length", 1, MAX_CONTEXT, context),
        attn_factor=keys.number("rope.scaling.attn_factor", 0.0, 1e6, 1.0),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 0.0, 1e6, 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 0.0, 1e6, 1.0),
        has_factors=has_factors,
    )


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise UnsupportedModelError(f"{key} is {shown(value)}, not a text")
    return value or None


_FAMILIES = {
    "llama": _llama_family,
    "qwen2": _llama_family,
    "qwen3": _qwen3_family,
    "gemma": _gemma_family,
    "gemma3": _gemma3_family,
}
# Which elements of a head rotate together. Converters reorder the rows of llama files for "norm", no others.
_PAIRINGS = {architecture: "norm" if architecture == "llama" else "neox" for architecture in _FAMILIES}

_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
}


def _from_dict(cls: type, values: Mapping[str, Any]) -> Any:
    if not isinstance(values, Mapping) or set(values) != {f.name for f in fields(cls)}:
        raise UnsupportedModelError(f"a {cls.__name__} has the wrong fields")
    checked = {}
    for field in fields(cls):
        value = values[field.name]
        if field.type == "RopeSpec":
            value = _from_dict(RopeSpec, value)
        elif not isinstance(value, _TYPES[field.type]) or (field.type == "int" and not 0 <= value <= MAX_CONTEXT):
            raise UnsupportedModelError(f"{cls.__name__}.{field.name} is {value!r}")
        checked[field.name] = value
    return cls(**checked)
