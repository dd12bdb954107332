"""`coremill bench draw`: which lines come of which reports, and a well-formed picture of them."""

import json
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner

from coremill.tools.bench import draw
from coremill.tools.cli import main

SVG = "{http://www.w3.org/2000/svg}"


def decode(sequences, context, rate, workers=1):
    row = {"what": "decode", "sequences": sequences, "context": context, "tokens_per_s": rate, "workers": workers}
    return row


def bench_report():
    sizes = [(1, 128, 100.0), (8, 128, 400.0), (16, 128, 500.0), (1, 700, 90.0), (16, 700, 450.0), (16, 2048, 300.0)]
    prefill = {"what": "prefill", "sequences": 1, "context": 512, "tokens_per_s": 1000.0, "workers": 1}
    return {
        "model": {"name": "A <small> & simple model"},
        "one_worker": [prefill, *(decode(*size) for size in sizes)],
        "all_workers": [prefill | {"workers": 2}, *(decode(s, c, 2 * rate, 2) for s, c, rate in sizes)],
    }


def workers_report():
    rows = [decode(16, 128, 500.0, 1), decode(16, 128, 950.0, 2), decode(16, 128, 1700.0, 4)]
    return {"model": {"name": "M"}, "workers": rows, "rounds": 3}


def test_lines_of_a_bench():
    batch, context = draw.panels_of(bench_report())
    assert [(line.name, line.points) for line in batch.lines] == [
        ("1 worker, at 128", [(1, 100.0), (8, 400.0), (16, 500.0)]),
        ("1 worker, at 700", [(1, 90.0), (16, 450.0)]),
        ("2 workers, at 128", [(1, 200.0), (8, 800.0), (16, 1000.0)]),
        ("2 workers, at 700", [(1, 180.0), (16, 900.0)]),
    ]
    assert [(line.name, line.points[-1]) for line in context.lines] == [
        ("1 worker x 16", (2048, 300.0)),
        ("2 workers x 16", (2048, 600.0)),
    ]


def test_lines_over_workers():
    (panel,) = draw.panels_of(workers_report())
    ideal, measured = panel.lines
    assert measured.points == [(1, 500.0), (2, 950.0), (4, 1700.0)]
    assert ideal.points == [(1, 500.0), (2, 1000.0), (4, 2000.0)] and ideal.dashed


def test_ends_of_axes():
    assert [draw.nice_top(value) for value in (1, 1.5, 300, 401, 801, 0)] == [1, 2, 400, 800, 1000, 1]


def test_names_keep_apart():
    placed = draw.spread([100, 101, 50, 299], 14, 0, 300)
    assert placed == [100, 114, 50, 299]
    assert draw.spread([300, 300, 300], 14, 0, 300) == [272, 286, 300]


def test_the_picture(tmp_path):
    for name, report in {"bench.json": bench_report(), "workers.json": workers_report()}.items():
        (tmp_path / name).write_text(json.dumps(report))
    out = tmp_path / "bench.svg"
    command = ["bench", "draw", str(tmp_path / "bench.json"), str(tmp_path / "workers.json"), "-o", str(out)]
    for _ in range(2):  # its own file is replaced
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output
    root = ET.fromstring(out.read_text())
    groups = root.findall(f"{SVG}g")
    assert len(groups) == 3 == len(done.stdout.splitlines())
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"A <small> & simple model", "tokens/s over context", "2 workers, at 700"} <= set(texts)
    for group, count in zip(groups, (10, 6, 6), strict=True):
        circles = group.findall(f"{SVG}circle")
        assert len(circles) == count
        assert all(0 < float(c.get("cx")) < draw._WIDTH and 0 < float(c.get("cy")) < draw._HEIGHT for c in circles)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"workers": []}'])
def test_files_that_are_no_report(tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    done = CliRunner().invoke(main, ["bench", "draw", str(tmp_path / "bad.json"), "-o", str(tmp_path / "x.svg")])
    assert done.exit_code == 2 and "bad.json: not what `coremill bench --json`" in done.stderr


def test_what_is_not_written(tmp_path):
    report = workers_report()
    report["workers"] = report["workers"][:1]
    (tmp_path / "one.json").write_text(json.dumps(report))
    command = ["bench", "draw", str(tmp_path / "one.json"), "-o", str(tmp_path / "x.svg")]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2 and "too few sizes" in done.stderr and not (tmp_path / "x.svg").exists()
    (tmp_path / "x.svg").write_text("my notes")
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2 and "is not an SVG file" in done.stderr
