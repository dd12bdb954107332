"""Llama and its kin: norm, attention with rotary positions and grouped heads, norm, gated feed-forward.

x = embed(tokens)
each layer:  x += attn_output * attention(rope(attn_qkv * norm(x)))
             x += ffn_down * (act(gate * norm(x)) * (up * norm(x)))
logits = output * norm(x), for rows after which a token is sampled

Of its kin, qwen2 has biases, qwen3 and gemma3 norms of query and key heads, gemma a scaled embedding and gelu, gemma3
also norms of what is added to x, and layers with a window and positions of their own. ModelSpec says which.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from coremill.config.errors import UnsupportedModelError
from coremill.worker.plan import ACT, OUTPUTS, Plan

if TYPE_CHECKING:
    from coremill.native.packfile import PackFile

PANEL = 16
# What the attention kernels can do (native/isa/attention.inc).
MAX_HEAD_DIM, HEAD_DIM_STEP = 256, 8


def _padded(width: int) -> int:
    return -(-width // PANEL) * PANEL


def describe(pack: PackFile) -> Plan:
    spec, plan = pack.spec, Plan()
    if spec.head_dim % HEAD_DIM_STEP or spec.head_dim > MAX_HEAD_DIM:
        raise UnsupportedModelError(
            f"attention heads of {spec.head_dim} elements are not supported: "
            f"only multiples of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
        )
    heads_width = spec.num_heads * spec.head_dim
    x = plan.buffer("x", spec.hidden_size)
    plan.buffer("norm", spec.hidden_size)
    plan.buffer("norm.act", spec.hidden_size, ACT)
    plan.buffer("qkv", pack.matrices["blk.0.attn_qkv"].num_panels * PANEL)
    plan.buffer("attn", heads_width)
    plan.buffer("attn.act", heads_width, ACT)
    plan.buffer("ffn", _padded(spec.ffn_size))
    plan.buffer("ffn.act", spec.ffn_size, ACT)

    plan.add("embed", "embed", dst=x, matrix="token_embd", factor=spec.embedding_scale)
    plan.add("rope_table", "rope_table")
    for layer in range(spec.num_layers):
        _attention(plan, pack, layer)
        _feed_forward(plan, pack, layer)
    _head(plan, pack)
    return plan


def _norm_and_pack(plan: Plan, label: str, vector: str, eps: float) -> None:
    plan.add(f"{label}_norm", "rmsnorm", dst="norm", src="x", vector=vector, factor=eps)
    plan.add(f"{label}_pack", "act_pack", dst="norm.act", src="norm")


def _attention(plan: Plan, pack: PackFile, layer: int) -> None:
    spec, blk = pack.spec, f"blk.{layer}"
    q, k, v = (first for _, first, _ in pack.matrices[f"{blk}.attn_qkv"].parts)
    _norm_and_pack(plan, f"{layer}.attn", f"{blk}.attn_norm", spec.norm_eps)
    _matrix(plan, pack, f"{layer}.attn_qkv", f"{blk}.attn_qkv", dst="qkv", src="norm.act")
    if spec.head_norms:
        for name, column, heads in (("q", q, spec.num_heads), ("k", k, spec.num_kv_heads)):
            plan.add(
                f"{layer}.attn_{name}_norm",
                "head_norm",
                dst="qkv",
                vector=f"{blk}.attn_{name}_norm",
                columns=(column, 0),
                heads=(heads, 0),
                factor=spec.norm_eps,
            )
    local = spec.is_local(layer)
    plan.add(
        f"{layer}.rope",
        "rope",
        dst="qkv",
        columns=(q, k),
        heads=(spec.num_heads, spec.num_kv_heads),
        rope=int(local and spec.local_rope is not None),
    )
    plan.add(f"{layer}.kv_store", "kv_store", src="qkv", columns=(k, v), layer=layer)
    plan.add(
        f"{layer}.attention",
        "attention",
        dst="attn",
        src="qkv",
        columns=(q, 0),
        heads=(spec.num_heads, 0),
        layer=layer,
        factor=1.0 / math.sqrt(spec.head_dim),
        window=spec.sliding_window if local else 0,
    )
    plan.add(f"{layer}.attn_out_pack", "act_pack", dst="attn.act", src="attn")
    _branch_end(plan, pack, f"{layer}.attn", f"{layer}.attn_output", f"{blk}.attn_output", src="attn.act")


def _feed_forward(plan: Plan, pack: PackFile, layer: int) -> None:
    blk = f"blk.{layer}"
    _norm_and_pack(plan, f"{layer}.ffn", f"{blk}.ffn_norm", pack.spec.norm_eps)
    glu = f"{pack.spec.activation}_glu"
    _matrix(plan, pack, f"{layer}.ffn_gate_up", f"{blk}.ffn_gate_up", dst="ffn", src="norm.act", epilogue=glu)
    plan.add(f"{layer}.ffn_down_pack", "act_pack", dst="ffn.act", src="ffn")
    _branch_end(plan, pack, f"{layer}.ffn", f"{layer}.ffn_down", f"{blk}.ffn_down", src="ffn.act")


def _branch_end(plan: Plan, pack: PackFile, branch: str, label: str, matrix: str, src: str) -> None:
    """Add matrix * src to x, normalised where the model wants that."""
    if not pack.spec.branch_norms:
        _matrix(plan, pack, label, matrix, dst="x", src=src, epilogue="add")
        return
    _matrix(plan, pack, label, matrix, dst="norm", src=src)
    vector = f"blk.{branch}_branch_norm"
    plan.add(f"{branch}_branch_norm", "norm_add", dst="x", src="norm", vector=vector, factor=pack.spec.norm_eps)


def _head(plan: Plan, pack: PackFile) -> None:
    spec = pack.spec
    plan.buffer("out", spec.hidden_size, space=OUTPUTS)
    plan.buffer("out.act", spec.hidden_size, ACT, OUTPUTS)
    plan.add("gather_out", "gather_out", dst="out", src="x")
    plan.add("output_norm", "rmsnorm", dst="out", src="out", vector="output_norm", factor=spec.norm_eps)
    plan.add("output_pack", "act_pack", dst="out.act", src="out")
    _matrix(plan, pack, "head", "token_embd" if spec.tied_output else "output", src="out.act", kind="head")
    plan.add("sample", "sample")


def _matrix(plan: Plan, pack: PackFile, label: str, name: str, *, kind: str = "gemm", **fields: object) -> None:
    bias = f"{name}.bias"
    plan.add(label, kind, matrix=name, bias=bias if bias in pack.vectors else None, **fields)
