"""The plan of a llama model, its table, and what a plan refuses."""

import pytest

from coremill.config.errors import EngineError, UnsupportedModelError
from coremill.worker.architectures import describe
from coremill.worker.plan import Plan


def test_llama_plan(tiny):
    pack = tiny(layers=2, bias=True).pack
    plan = describe(pack)
    labels = [op.label for op in plan.ops]
    assert labels[:2] == ["embed", "rope_table"]
    assert labels[-5:] == ["gather_out", "output_norm", "output_pack", "head", "sample"]
    assert [label for label in labels if label.startswith("0.")] == [
        f"0.{name}"
        for name in (
            "attn_norm attn_pack attn_qkv rope kv_store attention attn_out_pack attn_output "
            "ffn_norm ffn_pack ffn_gate_up ffn_down_pack ffn_down"
        ).split()
    ]
    assert len(plan.ops) == 2 + 13 * 2 + 5
    by_label = {op.label: op for op in plan.ops}
    assert by_label["1.attn_qkv"].bias == "blk.1.attn_qkv.bias"
    # Parts start on whole panels: 144 q rows, 72 k rows padded to 80.
    assert by_label["1.rope"].columns == (0, 144) and by_label["1.kv_store"].columns == (144, 224)
    assert by_label["1.rope"].heads == (6, 3)
    assert by_label["head"].matrix == "output" and by_label["head"].bias is None
    assert plan.buffers["qkv"].width == 304
    assert set(plan.matrices()) == set(pack.matrices)
    assert set(plan.vectors()) == set(pack.vectors)


def test_tied_models_use_the_embedding_twice(tiny):
    plan = describe(tiny(tied=True).pack)
    assert [op.matrix for op in plan.ops if op.kind in ("embed", "head")] == ["token_embd", "token_embd"]


def test_a_plan_prints_as_a_table(tiny):
    lines = str(describe(tiny().pack)).splitlines()
    assert lines[0].split() == ["#", "operation", "kind", "from", "to", "with"]
    starts = [line.index(word) for line, word in zip(lines[1:3], ("embed", "rope_table"), strict=True)]
    assert len(set(starts)) == 1
    (row,) = [line for line in lines if " 0.attn_output " in line]
    assert row.split("  ")[-1].strip() == "blk.0.attn_output, residual"
    assert "attn.act[tokens][144] packed" in row and "x[tokens][40]" in row


def test_what_a_plan_refuses(tiny):
    plan = Plan()
    plan.buffer("x", 8)
    plan.buffer("x", 8)
    with pytest.raises(ValueError, match="declared as"):
        plan.buffer("x", 9)
    with pytest.raises(ValueError, match="'y', which is not declared"):
        plan.add("op", "rmsnorm", dst="y", src="x")


def test_packs_that_do_not_fit_are_refused_by_name(tiny, harness, monkeypatch):
    model = tiny()
    monkeypatch.setitem(model.pack.vectors, "kept", model.pack.vectors["output_norm"])
    norm = model.pack.vectors.pop("output_norm")
    try:
        with pytest.raises(EngineError, match="'output_norm', which is not packed"):
            harness(model.pack)
    finally:
        model.pack.vectors["output_norm"] = norm
    monkeypatch.setattr("coremill.worker.architectures._MODULES", {})
    with pytest.raises(UnsupportedModelError, match="'llama' has no plan"):
        describe(model.pack)
