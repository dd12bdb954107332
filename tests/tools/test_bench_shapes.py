"""`coremill bench shape`: files of known sizes with random weights, through packing and the table."""

import numpy as np
import pytest
from click.testing import CliRunner

from coremill.config.arena import ArenaGeometry
from coremill.config.errors import ConfigError
from coremill.config.formats import BY_NAME
from coremill.config.settings import from_command_line
from coremill.native.gguf import open_gguf
from coremill.native.packer import preview_pack
from coremill.tools.bench import shapes, table
from coremill.tools.bench.engine import engine_report
from coremill.tools.bench.shapes import SHAPES, Shape, num_bytes, tensors
from coremill.tools.cli import main

TINY = Shape(2, 256, 4, 2, 512, 1200, 2048, 1e4, True, 64, biases=True, rope_factors=True)


def settings(tmp_path, **given):
    return from_command_line("bench shape", given, {"HOME": str(tmp_path)})


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setenv("COREMILL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama-3.2-1b", 1.236e9), ("qwen2.5-1.5b", 1.544e9), ("llama-3.1-8b", 8.03e9)]
)
def test_shapes_have_the_published_sizes(name, parameters):
    total = sum(np.prod(dims, dtype=np.int64) for _, dims, _ in tensors(SHAPES[name], BY_NAME["Q8_0"]))
    assert total == pytest.approx(parameters, rel=0.001)


@pytest.mark.parametrize("weights", ["f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"])
def test_a_file_of_each_format_is_a_model(tiny, tmp_path, weights):
    path = tmp_path / "tiny.gguf"
    made = shapes.write_shape("tiny", settings(tmp_path, output=str(path), weights=weights), lambda line: None)
    assert made["bytes"] == path.stat().st_size
    with open_gguf(path) as file:
        assert {info.name: info.nbytes for info in file.tensors.values()} == {
            name: num_bytes(dims, form) for name, dims, form in tensors(TINY, BY_NAME[weights.upper()])
        }
        with preview_pack(file) as pack:
            spec = pack.spec
            assert (spec.num_layers, spec.hidden_size, spec.ffn_size, spec.vocab_size) == (2, 256, 512, 1200)
            assert ArenaGeometry.for_model(spec, 1).token_bytes == 2 * 2 * 2 * 64 * 2
            assert "blk.0.attn_qkv.bias" in pack.vectors


def test_text_goes_through_such_a_file(tiny, tmp_path):
    from coremill.coordinator import Coordinator

    path = tmp_path / "tiny.gguf"
    shapes.write_shape("tiny", settings(tmp_path, output=str(path)), lambda line: None)
    with Coordinator(str(path), workers=1) as coordinator:
        result = coordinator.submit(prompt="any text, \u00e9", max_tokens=4, temperature=0).result()
    assert 0 < result.usage.completion_tokens <= 4


def test_the_table_of_a_shape(tiny, tmp_path, monkeypatch):
    for name, value in {
        "_GEMM_TOKENS": (1,), "_QUICK_SEQUENCES": (2,), "_PREFILL": 64, "_QUICK_STEP_SECONDS": 0.01,
        "_QUICK_CEILING_SECONDS": 0.02, "_CEILING_SECONDS": 0.02,
    }.items():  # fmt: skip
        monkeypatch.setattr(table, name, value)
    # So small a model is through before anybody looks; tests/tools/test_bench.py has the engine.
    monkeypatch.setattr(
        table, "_all_workers", lambda pack, chosen, *rest: [engine_report(case, [1.0], 1, 1.0) for case in chosen]
    )
    done = CliRunner().invoke(main, ["bench", "shape", "tiny", "--quick"])
    assert done.exit_code == 0, done.output
    assert "Model tiny Q4_K, random weights (llama" in done.stdout and "Packed in " in done.stdout
    assert "blk.0.ffn_down 256 x 512 Q4_K" in done.stdout
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_is_refused(tiny, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"shape .llama-3.2-1. is not known; did you mean 'llama-3.2-1b'"):
        shapes.bench_shape("llama-3.2-1", settings(tmp_path), lambda line: None)
    (tmp_path / "there.gguf").touch()
    with pytest.raises(ConfigError, match=r"--output .*there\.gguf: there is such a file already"):
        shapes.write_shape("tiny", settings(tmp_path, output=str(tmp_path / "there.gguf")), lambda line: None)
    monkeypatch.setitem(SHAPES, "huge", Shape(4096, 1 << 20, 64, 64, 1 << 20, 1 << 24, 2048, 1e4, False, 128))
    with pytest.raises(ConfigError, match=r"GB are needed there, .* GB are free"):
        shapes.bench_shape("huge", settings(tmp_path), lambda line: None)
    monkeypatch.setitem(SHAPES, "odd", Shape(1, 96, 4, 2, 512, 700, 2048, 1e4, True, 24))
    with pytest.raises(ConfigError, match=r"--weights is q4_k: token_embd\.weight has rows of 96, .* multiple of 256"):
        shapes.bench_shape("odd", settings(tmp_path), lambda line: None)
