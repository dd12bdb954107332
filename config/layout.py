"""Which tensors of a model file become which packed matrices and vectors.

A packed matrix stacks the rows (outputs) of one or several tensors in panels of 16 rows. "concat" puts
whole parts one after the other, each padded to full panels; "interleave" takes one panel of each part in
turn, so that a gate panel and its up panel are neighbours. A bias is padded and fused as its matrix is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from coremill.config.errors import UnsupportedModelError
from coremill.config.formats import PANEL_ROWS
from coremill.config.model import ModelSpec, TensorShape

Fusion = Literal["concat", "interleave"]


@dataclass(frozen=True, slots=True)
class Part:
    """One source tensor: `rows` outputs (for a vector: elements)."""

    source: str
    rows: int

    @property
    def panels(self) -> int:
        return -(-self.rows // PANEL_ROWS)


@dataclass(frozen=True, slots=True)
class MatrixRule:
    """A packed matrix of k inputs, from the rows of its parts. Sources are tensors of shape (k, rows)."""

    name: str
    k: int
    parts: tuple[Part, ...]
    fusion: Fusion = "concat"

    @property
    def num_panels(self) -> int:
        return sum(part.panels for part in self.parts)

    @property
    def n(self) -> int:
        """Outputs: up to the last real row; whole panels when parts alternate."""
        if self.fusion == "interleave":
            return self.num_panels * PANEL_ROWS
        return self.first_row(len(self.parts) - 1) + self.parts[-1].rows

    def first_row(self, part: int) -> int:
        """Output row at which a part starts."""
        if self.fusion == "interleave":
            return part * PANEL_ROWS
        return sum(p.panels for p in self.parts[:part]) * PANEL_ROWS

    def panel_source(self, panel: int) -> tuple[int, int]:
        """(part, panel within that part) of a packed panel."""
        if self.fusion == "interleave":
            within, part = divmod(panel, len(self.parts))
            return part, within
        for part, spec in enumerate(self.parts):
            if panel < spec.panels:
                return part, panel
            panel -= spec.panels
        raise IndexError(panel)


@dataclass(frozen=True, slots=True)
class VectorRule:
    """A packed f32 vector. With `matrix`, it is that matrix's bias; parts a file lacks are zeros.

    A vector whose sources are all absent is left out if `optional`, an error otherwise.
    """

    name: str
    parts: tuple[Part, ...]
    optional: bool = False
    matrix: MatrixRule | None = None

    @property
    def length(self) -> int:
        if self.matrix is not None:
            return self.matrix.num_panels * PANEL_ROWS
        return self.parts[0].rows


Rule = MatrixRule | VectorRule


def all_rules(spec: ModelSpec) -> Iterator[Rule]:
    """Every matrix and vector a model of this description can have, optional ones included, in pack order.

    One at a time: a description may claim thousands of layers that its file does not have.
    """
    return _llama(spec)


def layout(spec: ModelSpec, tensors: Mapping[str, TensorShape]) -> list[Rule]:
    """The rules that pack a model, in pack order, checked against the tensors its file has.

    Raises:
        UnsupportedModelError: a tensor is missing, has another shape than the description says, or belongs
            to an operation coremill lacks (every tensor of the file must be used or known as harmless).
    """
    rules, used = [], set()
    for rule in all_rules(spec):
        present = [part for part in rule.parts if part.source in tensors]
        if isinstance(rule, VectorRule) and rule.optional and not present:
            continue
        for part in rule.parts if isinstance(rule, MatrixRule) or not rule.optional else present:
            _check_shape(rule, part, tensors)
            used.add(part.source)
        rules.append(rule)
    for name in tensors:
        if name not in used and not name.endswith(_HARMLESS):
            what = "; mixtures of experts are not supported" if "exps" in name or "ffn_gate_inp" in name else ""
            raise UnsupportedModelError(f"tensor '{name}' has no place in a '{spec.architecture}' model{what}")
    return rules


# Precomputed tables that old converters wrote; everything in them follows from the description.
_HARMLESS = (".attn_rot_embd", ".attn_rot_embd.weight", ".rope.freqs", ".attention.rotary_emb.inv_freq")


def _check_shape(rule: Rule, part: Part, tensors: Mapping[str, TensorShape]) -> None:
    tensor = tensors.get(part.source)
    if tensor is None:
        raise UnsupportedModelError(f"tensor '{part.source}' is missing")
    expected = (rule.k, part.rows) if isinstance(rule, MatrixRule) else (part.rows,)
    # A matrix with a single row may be stored as a vector; trailing ones carry no information.
    shape = tuple(tensor.shape)
    while len(shape) > len(expected) and shape[-1] == 1:
        shape = shape[:-1]
    if shape != expected:
        raise UnsupportedModelError(
            f"tensor '{part.source}' has shape {tuple(tensor.shape)}, but the model's description asks for {expected}"
        )


def _llama(spec: ModelSpec) -> Iterator[Rule]:
    """Norm, attention, norm, gated feed-forward; the embedding doubles as output matrix when tied."""
    hidden = spec.hidden_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield MatrixRule("token_embd", hidden, (Part("token_embd.weight", spec.vocab_size),))
    for layer in range(spec.num_layers):
        blk = f"blk.{layer}"
        norm = Part(f"{blk}.attn_norm.weight", hidden)
        q, k, v = (Part(f"{blk}.attn_{c}.weight", rows) for c, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)))
        output = Part(f"{blk}.attn_output.weight", hidden)
        yield VectorRule(f"{blk}.attn_norm", (norm,))
        yield from _with_bias(MatrixRule(f"{blk}.attn_qkv", hidden, (q, k, v)))
        if spec.head_norms:
            for name in ("attn_q_norm", "attn_k_norm"):
                yield VectorRule(f"{blk}.{name}", (Part(f"{blk}.{name}.weight", spec.head_dim),))
        yield from _with_bias(MatrixRule(f"{blk}.attn_output", q_rows, (output,)))
        if spec.branch_norms:
            yield VectorRule(f"{blk}.attn_branch_norm", (Part(f"{blk}.post_attention_norm.weight", hidden),))

        norm = Part(f"{blk}.ffn_norm.weight", hidden)
        gate, up = (Part(f"{blk}.ffn_{name}.weight", spec.ffn_size) for name in ("gate", "up"))
        down = Part(f"{blk}.ffn_down.weight", hidden)
        yield VectorRule(f"{blk}.ffn_norm", (norm,))
        yield from _with_bias(MatrixRule(f"{blk}.ffn_gate_up", hidden, (gate, up), "interleave"))
        yield from _with_bias(MatrixRule(f"{blk}.ffn_down", spec.ffn_size, (down,)))
        if spec.branch_norms:
            yield VectorRule(f"{blk}.ffn_branch_norm", (Part(f"{blk}.post_ffw_norm.weight", hidden),))
    yield VectorRule("output_norm", (Part("output_norm.weight", hidden),))
    if not spec.tied_output:
        yield from _with_bias(MatrixRule("output", hidden, (Part("output.weight", spec.vocab_size),)))
    if spec.rope.has_factors:
        yield VectorRule("rope_factors", (Part("rope_freqs.weight", spec.rope.dim // 2),))


def _with_bias(matrix: MatrixRule) -> list[Rule]:
    sources = tuple(Part(p.source.removesuffix(".weight") + ".bias", p.rows) for p in matrix.parts)
    return [matrix, VectorRule(f"{matrix.name}.bias", sources, optional=True, matrix=matrix)]
