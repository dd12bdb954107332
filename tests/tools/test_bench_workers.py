"""`coremill bench workers`: what is counted, and one short run with real workers."""

import pytest

from coremill.config.settings import from_command_line
from coremill.tools.bench import engine, workers
from coremill.tools.bench.engine import Rate
from coremill.tools.bench.limits import decode_shape
from coremill.tools.bench.steps import Case


def test_counts_up_to_the_most():
    found = [workers.worker_counts(most) for most in (1, 2, 3, 4, 6, 8, 192)]
    assert found == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8], [1, 2, 4, 8, 16, 32, 64, 128, 192]]


def test_figures_of_a_count():
    case = Case("decode", 16, 128, (decode_shape(16, 128),), 16)
    found = {
        (1, case.label): [Rate(100.0, 2.0, 0.02, 1.98), Rate(50.0, 2.0, 0.02, 1.98)],
        (2, case.label): [Rate(190.0, 1.0, 0.04, 1.96), Rate(100.0, 1.0, 0.04, 1.96)],
    }
    row = workers._row(case, 2, found, cores_per_worker=3)
    assert (row["workers"], row["cores"], row["tokens_per_s"], row["speedup"]) == (2, 6, 145.0, 1.95)
    assert (row["busy_cores_workers"], row["busy_cores_coordinator"], row["coordinator_share"]) == (1.96, 0.04, 0.02)
    assert row["ms_per_token"] == pytest.approx(1000 / 145, abs=1e-4)
    assert workers._row(case, 1, found, 3)["speedup"] == 1.0


def test_a_short_run(monkeypatch, smollm2_pack, tmp_path, restless):
    monkeypatch.setattr(workers, "_PREFILL", 64)
    monkeypatch.setattr(engine, "_WINDOW_SECONDS", 0.05)
    lines = []
    given = {"model": str(smollm2_pack), "rounds": "1", "max_active": "2"}
    report = workers.bench_workers(from_command_line("bench workers", given, {"HOME": str(tmp_path)}), lines.append)
    rows = [(row["what"], row["sequences"], row["context"], row["workers"]) for row in report["workers"]]
    counts = workers.worker_counts(rows[-1][3])
    assert rows == [("prefill", 1, 64, n) for n in counts] + [("decode", 2, 128, n) for n in counts]
    assert all(row["tokens_per_s"] > 0 and 0 <= row["coordinator_share"] < 1 for row in report["workers"])
    assert len(lines) == len(rows)
    busy = "the cores were 50% busy with something else before"
    assert report["warnings"] == [f"round 1, {count} workers: {busy}" for count in counts]
    text = workers.workers_text(report)
    assert "Prefill of 64\n" in text and "Decode, 2 x 128\n" in text
    assert text.endswith(f"Warning: round 1, {counts[-1]} workers: {busy}.\n")
