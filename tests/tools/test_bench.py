"""`coremill bench`: what is counted, what a limit is, and one short run over the default model."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from coremill.config.options import PROCESS_VARIABLES
from coremill.config.settings import from_command_line
from coremill.tools.bench import engine, table
from coremill.tools.bench.limits import StepLimits, StepShape, decode_shape, format_rows, prefill_shapes
from coremill.tools.bench.text import columns, report_text
from coremill.tools.cli import main
from coremill.worker.plan import ACT, OUTPUTS, Plan

Q4_1, Q8_0 = 3, 8


def matrix(n, k, *parts):
    return SimpleNamespace(
        n=n, k=k, num_panels=-(-n // 16), nbytes=n * k, parts=tuple((str(i), 0, r) for i, (r, _) in enumerate(parts)),
        formats=tuple(type_id for _, type_id in parts),
    )  # fmt: skip


def test_steps_of_a_prompt():
    assert prefill_shapes(300, 128) == [
        StepShape(((128, 128),), 0),
        StepShape(((128, 256),), 0),
        StepShape(((44, 300),), 1),
    ]
    assert prefill_shapes(128, 128) == [StepShape(((128, 128),), 1)]
    assert decode_shape(3, 700) == StepShape(((1, 701),) * 3, 3)
    assert (decode_shape(3, 700).num_rows, prefill_shapes(300, 128)[0].num_rows) == (3, 128)


def test_rows_by_format():
    assert format_rows(matrix(60, 32, (20, Q4_1), (20, Q8_0), (20, Q4_1))) == {Q4_1: 64, Q8_0: 32}


class FakeGemm:
    """Hot kernels of 1000 multiply-adds per second and token of the tile."""

    def matrix_limit(self, packed, num_tokens):
        return packed.n * packed.k * num_tokens / 1000


@pytest.fixture
def limits():
    plan = Plan()
    plan.buffer("x", 100)
    plan.buffer("x.act", 100, ACT)
    plan.buffer("out", 100, space=OUTPUTS)
    plan.add("0.norm", "rmsnorm", dst="x", src="x")
    plan.add("0.gemm", "gemm", dst="x", src="x.act", matrix="m")
    plan.add("0.attention", "attention", dst="x", src="x", heads=(4, 0))
    plan.add("out_norm", "rmsnorm", dst="out", src="out")
    plan.add("head", "head", src="x.act", matrix="m")
    plan.add("sample", "sample")
    pack = SimpleNamespace(
        matrices={"m": matrix(32, 100, (32, Q4_1))}, spec=SimpleNamespace(head_dim=8, num_kv_heads=2)
    )
    return StepLimits(pack, plan, FakeGemm(), read=1000.0, l2=100.0, attention=10.0)


def test_limits_of_operations(limits):
    norm, gemm, attention, out_norm, head, sample = limits.plan.ops
    shape = StepShape(((3, 10), (1, 5)), 1)
    assert limits.seconds(norm, shape) == 4 * 100 * 8 / 100
    # 3 and 1 rows: 32 x 100 x 4 multiply-adds against 3200 bytes.
    assert limits.seconds(gemm, shape) == 12.8
    # Rows see 8 + 9 + 10 + 5 tokens, twice 4 heads x 8 elements each.
    assert limits.seconds(attention, shape) == 32 * 2 * 4 * 8 / 10
    assert limits.seconds(out_norm, shape) == 1 * 100 * 8 / 100
    assert limits.seconds(head, shape) == 3.2
    assert limits.seconds(head, StepShape(((1, 1),), 0)) == 0
    assert limits.seconds(sample, shape) == 0
    assert limits.step_seconds(shape) == sum(limits.seconds(op, shape) for op in limits.plan.ops)


def test_memory_limits_when_arithmetic_is_cheap(limits):
    _, gemm, attention, *_ = limits.plan.ops
    slow_memory = StepLimits(limits.pack, limits.plan, limits.gemm, read=1.0, l2=100.0, attention=1e9)
    assert slow_memory.seconds(gemm, decode_shape(1, 0)) == 3200
    assert slow_memory.seconds(attention, decode_shape(2, 9)) == 2 * 10 * 2 * 8 * 4
    # A byte an element, and two scales of two bytes.
    assert replace(slow_memory, kv="q8").seconds(attention, decode_shape(2, 9)) == 2 * 10 * 2 * (8 * 2 + 4)


def test_busy_neighbours_slow_arithmetic(limits):
    half = replace(limits, busy=0.5)
    shape = StepShape(((3, 10), (1, 5)), 1)
    assert half.seconds(limits.plan.ops[1], shape) == 2 * limits.seconds(limits.plan.ops[1], shape)


def test_cases_leave_out_what_a_model_cannot_do():
    def labels(found):
        return [case.label for case in found]

    full = table.cases(2048, 128, quick=False)
    assert labels(full)[:3] == ["prefill of 512", "prefill of 1800", "decode, 1 x context 128"]
    assert labels(full)[-2:] == ["decode, 16 x context 256", "decode, 16 x context 1024"]
    assert len(full) == 16
    assert labels(table.cases(256, 128, quick=False))[:2] == ["prefill of 256", "decode, 1 x context 128"]
    assert not any("700" in label for label in labels(table.cases(256, 128, quick=False)))
    assert len(table.cases(2048, 128, quick=True)) == 4


def test_arena_of_the_largest_case():
    cases = table.cases(2048, 128, quick=False)
    assert engine.arena_blocks(cases, 2) == 2 * 32 * -(-(700 + 512) // 32)
    assert engine.arena_blocks(cases[:1], 1) == 4 * 17


def test_columns_line_up():
    assert columns(("a", "bb"), [("long", "1"), ("x", "22")]) == "  a     bb\n  long   1\n  x     22"


def test_warnings():
    calm = {"steal": 0.0, "load": 0.1, "cores": [0, 1], "read_gb_per_s_one_core": 20.0, "read_gb_per_s_all_cores": 30.0}
    report = {"machine": calm, "one_worker": [{"noise": 0.01}], "all_workers": [{"noise": 0.02}]}
    assert table._warnings(report) == []
    report["all_workers"].append({"noise": 0.3})
    report["machine"]["steal"] = 0.05
    report["left_out"] = ["decode, 32 x context 700"]
    steal, left_out, noise = table._warnings(report)
    assert "5.0%" in steal
    assert "decode, 32 x context 700" in left_out
    assert "1 of 3 figures varied by more than 10% between rounds (worst 30%)" in noise
    report["machine"] = {**calm, "load": 9999.0, "read_gb_per_s_all_cores": 15.0}
    report["all_workers"] = [{"noise": 0.0, "share": 1.28}]
    _, load, ceilings, _, share = table._warnings(report)
    assert "load 9999" in load and "15.0 GB/s, less than one alone (20.0)" in ceilings and "above 100%" in share


def test_options_before_peer_are_not_lost():
    done = CliRunner().invoke(main, ["bench", "--rounds", "2", "peer", "http://localhost:1", __file__])
    assert done.exit_code == 2
    assert "--rounds goes behind the word 'peer'" in done.stderr


def test_ceilings_alone_need_no_model(monkeypatch):
    monkeypatch.setattr(table, "_QUICK_CEILING_SECONDS", 0.02)
    done = CliRunner(env={"COREMILL_MODEL": None}).invoke(main, ["bench", "--roofline", "--quick"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Ceilings of this machine\n  instruction set")
    assert "Matrix products" not in done.stdout


def test_no_model_is_said():
    done = CliRunner(env={"COREMILL_MODEL": None}).invoke(main, ["bench", "--quick"])
    assert done.exit_code == 2
    assert "missing option -m/--model" in done.stderr


def test_a_short_run(monkeypatch, smollm2_pack, tmp_path):
    """Every part once, over few cases and for instants: figures are noise, their places are not."""
    for name, value in {
        "_GEMM_TOKENS": (1, 8), "_QUICK_SEQUENCES": (1, 2), "_PREFILL": 64, "_QUICK_STEP_SECONDS": 0.01,
        "_QUICK_CEILING_SECONDS": 0.02, "_CEILING_SECONDS": 0.02,
    }.items():  # fmt: skip
        monkeypatch.setattr(table, name, value)
    monkeypatch.setattr(engine, "_WINDOW_SECONDS", 0.05)
    for name in PROCESS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    given = {"model": str(smollm2_pack), "quick": True}
    report = table.bench(from_command_line("bench", given, {"HOME": str(tmp_path)}), lambda line: None)

    num_workers = len(report["machine"]["cores"])
    labels = [(row["what"], row["sequences"], row["context"]) for row in report["one_worker"]]
    assert labels == [("prefill", 1, 64), ("decode", 1, 128), ("decode", 2, 128)]
    assert [(row["what"], row["sequences"], row["context"]) for row in report["all_workers"]] == labels
    assert {row["workers"] for row in report["all_workers"]} == {num_workers}
    for row in [*report["one_worker"], *report["all_workers"]]:
        assert row["tokens_per_s"] > 0
        # An unquiet machine may pass its limit, which was measured at another moment, but not by much.
        assert 0 < row["share"] < 10
    operations = {entry["operation"] for entry in report["one_worker"][0]["operations"]}
    assert {"attn_qkv", "attention", "ffn_gate_up", "ffn_down", "head"} <= operations
    assert {row["matrix"] for row in report["gemm"]} >= {"token_embd", "blk.0.attn_qkv", "blk.0.ffn_down"}
    assert {row["tokens"] for row in report["gemm"]} == {1, 8}
    lone = report.get("lone", [])
    assert [row["what"] for row in lone] == (["prefill", "decode"] if num_workers > 1 else [])
    assert all(row["lent_tokens_per_s"] > 0 and row["alone_tokens_per_s"] > 0 for row in lone)
    text = report_text(report)
    assert ("A sequence alone\n" in text) == (num_workers > 1)
    for title in ("Ceilings of this machine", "Matrix products, one core", "Steps", "Operations, 2 x 128"):
        assert f"{title}\n" in text
