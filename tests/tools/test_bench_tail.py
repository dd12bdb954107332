"""`coremill bench tail`: its arithmetic, and one real run."""

import pytest

from coremill.config.errors import EngineError
from coremill.config.settings import from_command_line
from coremill.tools.bench import tail
from coremill.tools.bench.tail import figures, idle_at_the_end, uneven_rows


def settings(folder, model, **given):
    return from_command_line("bench tail", {"model": str(model)} | given, {"HOME": str(folder)})


def test_idle_counts_only_at_the_end_and_only_beside_somebody_with_two():
    samples = [
        (0.0, (0, 0)),  # before anything: not part of the time
        (10.0, (1, 3)),
        (15.0, (0, 5)),  # idle, but long before the end
        (16.0, (3, 3)),
        (19.2, (0, 2)),  # 0.3 of the last second
        (19.5, (0, 1)),  # nobody could give anything away
        (19.7, (1, 0)),
        (20.0, (0, 0)),
        (25.0, (0, 0)),
    ]
    assert idle_at_the_end(samples) == pytest.approx([0.3, 0.0])
    assert idle_at_the_end(samples, share=0.5) == pytest.approx([(0.3 + 1.0) / 5, 0.0])
    assert idle_at_the_end(samples[:1]) == []
    assert idle_at_the_end([(1.0, (2, 0))]) == [0.0, 0.0]  # too short for a second look


def test_figures_of_a_round():
    workers = [{"busy_seconds": 4.0}, {"busy_seconds": 2.0}]
    lines = [{"timing": {"prefill_seconds": 0.5, "decode_seconds": end}} for end in (1.0, 3.5, 2.0)]
    stats = {"seconds": 4.4, "workers": workers, "sequences": {"moved": 7}}
    found = figures(stats, lines, [])
    assert (found["work_seconds"], found["longest_row_seconds"], found["moved"]) == (3.0, 4.0, 7)
    assert found["ratio"] == pytest.approx(1.1)


def test_rows_are_uneven_and_the_same_for_a_seed():
    assert uneven_rows(3) == uneven_rows(3) != uneven_rows(4)
    assert len(uneven_rows(1)) == tail.NUM_ROWS
    assert {row["max_tokens"] for row in uneven_rows(1)} == set(tail.LENGTHS)


def test_a_real_run(smollm2_pack, tmp_path, monkeypatch, restless):
    monkeypatch.setattr(tail, "NUM_ROWS", 6)
    monkeypatch.setattr(tail, "LENGTHS", (4, 30))
    lines = []
    report = tail.bench_tail(settings(tmp_path, smollm2_pack, rounds=1, max_active=2, lending=False), lines.append)
    (found,) = report["rounds"]
    assert found["ratio"] == found["seconds"] / max(found["work_seconds"], found["longest_row_seconds"]) > 0
    assert found["idle"] and all(0 <= share <= 1 for share in found["idle"])
    assert report["median_ratio"] == found["ratio"] and report["most_idle"] == max(found["idle"])
    assert lines[1].startswith("round 1: makespan ") and lines[2].startswith("median: ")
    assert lines[-1] == "warning: round 1: the cores were 50% busy with something else before"


def test_a_run_that_fails_says_why(tmp_path):
    with pytest.raises(EngineError, match=r"coremill run ended with code 1: coremill: .*missing\.gguf"):
        tail.run_once(uneven_rows(0), ["-m", str(tmp_path / "missing.gguf")])
