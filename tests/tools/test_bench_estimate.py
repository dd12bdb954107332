"""`coremill bench estimate`: what the paper says, worked out by hand."""

import json

import pytest
from click.testing import CliRunner

from coremill.tools.bench.estimate import Machine, estimate
from coremill.tools.cli import main

# A step of 16 sequences takes a core 10 ms.
CASE = {"what": "decode", "sequences": 16, "context": 99, "tokens_per_s": 1600.0}
COORDINATOR = [{"workers": 8, "cpu_us_per_message": 20.0}, {"workers": 192, "cpu_us_per_message": 50.0}]
WEIGHTS, KV = 50_000_000, 10_000


def made(cores, read, group=1, sockets=1):
    return estimate(CASE, WEIGHTS, KV, Machine(cores, sockets, read), group, COORDINATOR)


def test_bound_by_computing():
    row = made(8, 1e12)
    assert (row["bound_by"], row["step_ms"], row["tokens_per_s"], row["sequences"]) == ("compute", 10.0, 12800, 128)
    assert (row["weights_gb_per_s"], row["kv_gb_per_s"]) == (40.0, 12.8)
    assert (row["messages_per_s"], row["coordinator_cores"]) == (800, 0.016)


def test_bound_by_memory():
    # 8 workers read 50 MB of weights and 16 x 100 x 10 kB = 16 MB of keys and values each.
    row = made(8, 26.4e9)
    assert (row["bound_by"], row["step_ms"], row["tokens_per_s"]) == ("memory", 20.0, 6400)
    assert made(8, 26.4e9, sockets=2)["bound_by"] == "compute"


def test_a_group_reads_the_weights_once():
    # Two workers of four cores: 50 MB and 64 MB each.
    row = made(8, 22.8e9, group=4)
    assert (row["step_ms"], row["sequences"]) == (10.0, 128)
    assert row["weights_gb_per_s"] == 10.0 and row["messages_per_s"] == 200


def test_bound_by_the_coordinator():
    row = made(400, 1e15)  # more than was measured: as the largest
    assert (row["bound_by"], row["step_ms"], row["coordinator_cores"]) == ("coordinator", 20.0, 1.0)
    assert made(100, 1e15)["coordinator_cores"] == 0.5  # the next larger number


def test_the_command(tmp_path):
    other = CASE | {"context": 700, "tokens_per_s": 800.0}
    bench = {
        "model": {"name": "M", "streamed_bytes": WEIGHTS, "kv_token_bytes": KV},
        "one_worker": [{"what": "prefill"}, CASE, other, CASE | {"sequences": 8}],
    }
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    (tmp_path / "coordinator.json").write_text(json.dumps({"sequences": 16, "coordinator": COORDINATOR}))
    command = ["bench", "estimate", str(tmp_path / "bench.json"), str(tmp_path / "coordinator.json")]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert "Context 99\n" in done.stdout and "Context 700\n" in done.stdout
    assert "192 cores, 2 sockets" in done.stdout and "8 cores, 1 socket " in done.stdout
    report = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert {(row["cores"], row["sockets"]) for row in report["estimate"]} == {(8, 1), (64, 1), (192, 1), (192, 2)}


@pytest.mark.parametrize(
    ("swap", "sequences", "message"),
    [
        (True, 16, "coordinator.json: not what `coremill bench --json` prints"),
        (False, 8, "bench.json: no decode of 8 sequences in it"),
    ],
)
def test_files_that_do_not_fit(tmp_path, swap, sequences, message):
    bench = {"model": {"name": "M", "streamed_bytes": 1, "kv_token_bytes": 1}, "one_worker": [CASE]}
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    (tmp_path / "coordinator.json").write_text(json.dumps({"sequences": sequences, "coordinator": COORDINATOR}))
    paths = [str(tmp_path / "bench.json"), str(tmp_path / "coordinator.json")]
    done = CliRunner().invoke(main, ["bench", "estimate", *(reversed(paths) if swap else paths)])
    assert done.exit_code == 2 and message in done.stderr
