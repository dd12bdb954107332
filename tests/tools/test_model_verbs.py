"""inspect, pack and cache, on small models and on the default one."""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from coremill.native.packfile import open_pack
from coremill.tools import cli
from coremill.tools.inspect_report import examine

_path = Path(__file__).parent.parent / "native" / "gguf_writer.py"
_spec = importlib.util.spec_from_file_location("gguf_writer", _path)
gguf_writer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gguf_writer)


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("COREMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path) -> Path:
    formats = {"": "Q4_K", "attn_v": "Q6_K", "token_embd": "Q8_0"}
    builder = gguf_writer.tiny_llama(np.random.default_rng(0), formats, layers=3, hidden=256, ffn=256, heads=4)
    return builder.save(tmp_path / "tiny.gguf")


def coremill(*args: object) -> str:
    done = CliRunner().invoke(cli.main, [str(arg) for arg in args])
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*args: object) -> str:
    done = CliRunner().invoke(cli.main, [str(arg) for arg in args])
    assert done.exit_code != 0
    return done.stderr


def test_a_model_that_is_not_given(root):
    for verb in ("inspect", "pack"):
        assert refused(verb).startswith("coremill: missing MODEL, or option -m/--model (or COREMILL_MODEL in the")


# ---- inspect ----


def test_inspect_says_what_a_model_is(model, root):
    text = coremill("inspect", model)
    lines = dict(line.split(None, 1) for line in text.splitlines())
    assert lines["model"] == "Tiny (llama)" and lines["licence"] == "apache-2.0" and lines["supported"] == "yes"
    assert lines["formats"] == "1 Q8_0, 7 F32, 18 Q4_K, 3 Q6_K"
    assert lines["tokenizer"] == "gpt2, pre smollm, 300 tokens"
    assert "3 layers, hidden 256, ffn 256, 4 heads of 64 on 2 KV heads, tied output" in text
    # 3 layers x 2 heads x (64 keys + 64 values) x 2 bytes
    assert lines["KV"].startswith("cache       1.5 KiB a token") or "1.5 KiB a token" in lines["KV"]
    assert not root.exists()


def test_inspect_of_a_pack_tells_the_same(model, root, tmp_path):
    coremill("pack", model, "-o", tmp_path / "tiny.pack")
    of_file, of_pack = (json.loads(coremill("inspect", path, "--json", "--layout")) for path in
                        (model, tmp_path / "tiny.pack"))  # fmt: skip
    assert (of_file.pop("kind"), of_pack.pop("kind")) == ("gguf", "pack")
    for report in (of_file, of_pack):
        for name in ("path", "bytes", "files", "version"):
            report.pop(name, None)
    assert of_file == of_pack
    assert of_file["memory"]["kv_per_token"] == 3 * 2 * 128 * 2


def test_scratch_is_what_a_worker_takes(model, tmp_path, root):
    from coremill.config.arena import ArenaGeometry
    from coremill.native.arena import create_arena, map_arena
    from coremill.worker.model import WorkerModel

    memory = examine(model)["memory"]
    settings = memory["scratch_settings"]
    with open_pack(coremill("pack", model).strip()) as pack:
        geometry = ArenaGeometry.for_model(pack.spec, 4)
        fd = create_arena(geometry)
        with map_arena(fd, geometry) as arena:
            worker = WorkerModel(
                pack, arena, max_step_tokens=settings["step_tokens"], max_sequences=settings["max_active"]
            )
            assert memory["scratch_per_worker"] == worker.scratch_bytes
            worker.close()
        os.close(fd)


def test_layout_shows_each_tensor(model, root):
    text = coremill("inspect", model, "--layout")
    table = [line.split("  ") for line in text.splitlines() if line.startswith(("blk.", "token", "output", "..."))]
    rows = {cells[0]: [cell.strip() for cell in cells[1:] if cell.strip()] for cells in table}
    codes = "[8 blocks][4 lines][16 rows][4 k] + [1][d,dmin,8 sc,8 mn][16]"
    assert rows["blk.0.attn_q.weight"] == ["256 x 256", "Q4_K", "blk.0.attn_qkv (concat)", "from 0", "16", codes]
    assert rows["blk.0.attn_v.weight"][:4] == ["128 x 256", "Q6_K", "blk.0.attn_qkv (concat)", "from 384"]
    assert rows["blk.0.ffn_up.weight"][3] == "panels 1, 3, ..."
    assert rows["token_embd.weight"][0] == "300 x 256 +4"
    assert rows["output_norm.weight"] == ["256", "output_norm", "[256] f32"]
    assert "... layers 1 to 2 like layer 0" in rows and "blk.1.attn_q.weight" not in rows
    # Every tensor is in the full form.
    layout = json.loads(coremill("inspect", model, "--layout", "--json"))["layout"]
    tensors = [part["tensor"] for entry in layout for part in entry["parts"]]
    assert len(tensors) == len(set(tensors)) == 29


def test_inspect_says_why_a_model_is_not_supported(tmp_path, root):
    file = gguf_writer.GGUFBuilder()
    file.add("general.architecture", "string", "mamba")
    file.add("general.name", "string", "evil\x1b[2J\nname")
    file.tensor("t", (256,), 10, bytes(84))
    text = coremill("inspect", file.save(tmp_path / "m.gguf"))
    assert "no: general.architecture 'mamba' is not supported; supported: gemma, gemma3, llama, qwen2, qwen3" in text
    assert "1 Q2_K" in text and "\x1b" not in text
    report = json.loads(coremill("inspect", tmp_path / "m.gguf", "--json"))
    assert report["supported"] is False and "mamba" in report["why"] and report["parameters"] == 256


def test_inspect_shows_values_of_other_types_than_they_should_be(tmp_path, root):
    file = gguf_writer.GGUFBuilder()
    file.add("general.architecture", "string", "llama")
    for key in ("general.name", "general.license", "tokenizer.ggml.model", "tokenizer.ggml.pre"):
        file.add(key, "[u32]", [1, 2])
    file.add("tokenizer.ggml.tokens", "u32", 7)
    file.add("llama.context_length", "[[u32]]", [[7]])
    file.tensor("t", (256,), 10, bytes(84))
    assert "an array of 2, pre an array of 2, 0 tokens" in coremill("inspect", file.save(tmp_path / "m.gguf"))
    report = json.loads(coremill("inspect", tmp_path / "m.gguf", "--json"))
    assert report["why"] == "llama.context_length is an array of 1, not a number or one for each layer"
    assert report["name"] == report["license"] == "an array of 2" and report["tokenizer"]["tokens"] is None


def test_malformed_files_are_one_line(tmp_path, root):
    (tmp_path / "m.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes(4))
    assert refused("inspect", tmp_path / "m.gguf").count("\n") == 1
    assert "no such file" in refused("inspect", tmp_path / "absent.gguf")


def test_inspect_of_the_default_model(smollm2_gguf):
    report = examine(smollm2_gguf)
    assert report["parameters"] == 134_515_008 and report["formats"] == {"Q8_0": 1, "F32": 61, "Q4_1": 210}
    assert report["memory"]["kv_per_token"] == 30 * 3 * 64 * 2 * 2
    assert report["license"] == "apache-2.0" and report["context_length"] == 8192


# ---- pack ----


def test_pack_prints_where_the_pack_is(model, root, tmp_path):
    pack = Path(coremill("pack", model).strip())
    assert pack.parent == root / "packs" and coremill("pack", "-m", model, "--verify").strip() == str(pack)
    out = tmp_path / "mine.pack"
    assert coremill("pack", model, "-o", out, "--verify").strip() == str(out)
    assert out.read_bytes() == pack.read_bytes()
    assert coremill("pack", out).strip() == str(out)
    assert "is a pack already" in refused("pack", out, "-o", tmp_path / "again")


def test_where_a_run_writes_is_not_where_a_pack_goes(model, root, tmp_path, monkeypatch):
    pack = coremill("pack", model)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "coremill.toml").write_text('output = "results.jsonl"')
    monkeypatch.setenv("COREMILL_OUTPUT", "others.jsonl")
    assert coremill("pack", model, "--verify") == pack
    assert not (tmp_path / "results.jsonl").exists() and not (tmp_path / "others.jsonl").exists()


def test_pack_replaces_packs_only(model, root, tmp_path):
    text = tmp_path / "text"
    text.write_text("mine")
    assert "is not a pack" in refused("pack", model, "-o", text) and text.read_text() == "mine"
    before = model.read_bytes()
    assert "is not a pack" in refused("pack", model, "-o", model) and model.read_bytes() == before
    assert "not a regular file" in refused("pack", model, "-o", tmp_path)
    assert "there is no folder" in refused("pack", model, "-o", tmp_path / "none" / "x.pack")
    for _ in range(2):
        coremill("pack", model, "-o", tmp_path / "again.pack")


def test_verify_finds_damage(model, root):
    pack = Path(coremill("pack", model).strip())
    content = bytearray(pack.read_bytes())
    content[-4000] ^= 1
    pack.unlink()
    pack.write_bytes(content)
    assert "checksum" in refused("pack", model, "--verify")


# ---- cache ----


def test_cache_lists_and_prunes(model, root):
    assert coremill("cache", "path").strip() == str(root)
    assert coremill("cache", "ls").startswith("   0 bytes  in 0 files")
    pack = Path(coremill("pack", model).strip())
    (entry,) = json.loads(coremill("cache", "ls", "--json"))["entries"]
    assert entry["path"] == str(pack) and entry["sources"] == [str(model)] and entry["name"] == "Tiny"
    assert f"Tiny, from {model}" in coremill("cache", "ls")
    assert coremill("cache") == coremill("cache", "ls")
    assert coremill("cache", "--json") == coremill("cache", "ls", "--json")
    assert "--json goes behind the word 'ls'" in refused("cache", "--json", "ls")
    assert coremill("cache", "prune") == "nothing to remove\n" and pack.exists()
    model.unlink()
    assert "source gone or changed" in coremill("cache", "ls")
    assert f"would remove {pack}" in coremill("cache", "prune", "--dry-run") and pack.exists()
    assert f"removed {pack}" in coremill("cache", "prune") and not pack.exists()


def test_prune_by_age_and_everything(model, root):
    pack = Path(coremill("pack", model).strip())
    (root / "models").mkdir()
    (root / "models" / "fetched.gguf").write_bytes(b"x" * 1000)
    coremill("cache", "prune", "--unused-days", "1")
    assert pack.exists()
    os.utime(pack, (1, 1))
    coremill("cache", "prune", "--unused-days", "1")
    assert not pack.exists()
    coremill("pack", model)
    assert "fetched model" in coremill("cache", "ls")
    coremill("cache", "prune", "--everything")
    assert not list((root / "packs").iterdir()) and not list((root / "models").iterdir())


def test_inspect_fits_a_terminal(model):
    from coremill.tools.inspect import text_lines
    from coremill.tools.inspect_report import examine

    report = examine(model, layout=True)
    wide, narrow = ("\n".join(text_lines(report, width)) for width in (1 << 16, 80))
    assert all(len(line) <= 80 for line in narrow.splitlines() if str(model) not in line and "[" not in line)
    for text in (wide, narrow):
        assert all(part["tensor"] in text for entry in report["layout"][:3] for part in entry["parts"])
    assert "tensor in the file" in wide and "tensor in the file" not in narrow


def test_unusable_packs_are_shown_and_pruned(model, root):
    """Also one that would be made anew at its next use."""
    pack = Path(coremill("pack", model).strip())
    content = bytearray(pack.read_bytes())
    content[8200] ^= 1
    pack.unlink()
    pack.write_bytes(content)
    assert "unusable" in coremill("cache", "ls")
    assert f"removed {pack}" in coremill("cache", "prune") and not pack.exists()
