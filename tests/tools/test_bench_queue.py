"""`coremill bench queue`: one small real run, whose figures add up."""

from coremill.config.settings import from_command_line
from coremill.tools.bench import queue


def test_a_real_run(smollm2_pack, tmp_path, monkeypatch, restless):
    small = {"NUM_TINY": 30, "NUM_USUAL": 3, "USUAL_TOKENS": 4, "NUM_SINGLES": 2}
    for name, value in (small | {"NUM_BACKGROUND": 3, "URGENT_TOKENS": 20}).items():
        monkeypatch.setattr(queue, name, value)
    lines = []
    settings = from_command_line("bench queue", {"model": str(smollm2_pack), "rounds": 2}, {"HOME": str(tmp_path)})
    report = queue.bench_queue(settings, lines.append)
    for found in report["rounds"]:
        assert found["map_ratio"] == found["run_seconds"] / found["tiny"]["seconds"]
        assert 0 < found["usual"]["coordinator_share"] < 1 and 0 <= found["tiny"]["helper_share"] < 1
        assert found["urgent"]["recomputed_tokens"] == 0
        assert found["urgent"]["ratio"] == found["urgent"]["beside_seconds"] / found["urgent"]["alone_seconds"]
    ratios = [found["map_ratio"] for found in report["rounds"]]
    assert report["median"]["map_ratio"] == sum(ratios) / 2
    assert lines[2].startswith("median: first step ") and lines[-1].startswith("warning: round 2: the cores were 50%")
