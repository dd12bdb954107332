"""`coremill bench start`: real processes once, and what it does when they fail."""

import pytest

from coremill.config.errors import EngineError
from coremill.config.settings import from_command_line
from coremill.tools.bench import start as bench_start
from coremill.tools.bench.start import Command


def settings(folder, model, **given):
    return from_command_line("bench start", {"model": str(model)} | given, {"HOME": str(folder)})


def test_figures_add_up(smollm2_pack, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_start, "_NUM_ROWS", 6)
    lines = []
    report = bench_start.bench_start(settings(tmp_path, smollm2_pack, rounds=1), lines.append)
    (found,) = report["rounds"]
    assert report["median"] == found
    assert found["ready_seconds"] > 0 and found["first_token_seconds"] > 0
    if bench_start.survey().budget > 1:
        parts = [found[f"{name}_bytes"] for name in ("scratch", "kv", "own")]
        assert found["pss_bytes"] == sum(parts) and parts[0] > 0
        assert "a second worker adds" in lines[1]
    assert lines[1].startswith("round 1: from exec to ready")
    assert any(line.startswith("median: ") for line in lines)


def test_medians_and_a_machine_with_one_core(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_start.time, "sleep", lambda seconds: None)
    found = iter([9.0, 3.0, 1.0, 2.0])  # the first warms the cache

    def first_token(command):
        return {"ready_seconds": 0.5, "first_token_seconds": next(found)}

    class OneCore:
        budget = 1

    monkeypatch.setattr(bench_start, "first_token", first_token)
    monkeypatch.setattr(bench_start, "survey", OneCore)
    report = bench_start.bench_start(settings(tmp_path, "m.gguf", rounds=3), lambda line: None)
    assert [each["first_token_seconds"] for each in report["rounds"]] == [3.0, 1.0, 2.0]
    assert report["median"] == {"ready_seconds": 0.5, "first_token_seconds": 2.0}
    assert any("only one core" in warning for warning in report["warnings"])


def test_a_command_that_fails_says_why(tmp_path):
    command = Command(str(tmp_path / "missing.gguf"), tmp_path)
    with pytest.raises(EngineError, match=r"ended with code 1: coremill: .*missing\.gguf"):
        command.run([{"prompt": "x", "max_tokens": 1}])
    assert list(tmp_path.iterdir()) == []
