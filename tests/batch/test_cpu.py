"""CPU time of a run by process: who is counted from when, and a real run that says it."""

import json
import os
import subprocess
import sys
import time

from coremill.config.cputimes import cpu_seconds
from coremill.coordinator.batch.cpu import CpuUse, cpu_lines

SPIN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"


class _Engine:
    def __init__(self, *pids):
        self.pids = pids

    def stats(self, measure):
        assert not measure
        return {"workers": [{"pid": pid} for pid in self.pids]}


class _Text:
    pid = None


def _spin() -> subprocess.Popen:
    """A process that uses 0.3 s and then waits for its standard input to end."""
    code = SPIN + "print(flush=True)\ninput()\n"
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_each_process_counts_from_the_beginning_or_its_own_start():
    text, engine = _Text(), _Engine(os.getpid(), None)
    with _spin() as before:
        before.stdout.readline()
        engine.pids = (before.pid, None)
        use = CpuUse(engine, text)
        with _spin() as later:
            later.stdout.readline()
            text.pid, engine.pids = later.pid, (before.pid, later.pid)
            spent = use.report()
            later.communicate(b"\n")
        before.communicate(b"\n")
    assert spent["workers"][0] < 0.2 < spent["workers"][1] == spent["text_helper"]
    assert cpu_seconds(before.pid) == 0.0 and spent["coordinator"] >= 0


def test_seconds_of_this_process():
    begin, end = cpu_seconds(os.getpid()), time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert cpu_seconds(os.getpid()) - begin > 0.05


def test_the_table():
    lines = cpu_lines({"coordinator": 1.0, "text_helper": 1.0, "workers": [3.0, 5.0]})
    assert [line.split()[-1] for line in lines] == ["share", "10.0%", "10.0%", "30.0%", "50.0%"]
    assert lines[3].split()[:2] == ["worker", "0"]
    assert cpu_lines({"coordinator": 0.0, "text_helper": 0.0, "workers": []})[1].endswith("0.0%")


def test_a_run_says_what_each_process_used(tmp_path, smollm2_pack):
    rows = "".join(json.dumps({"prompt": f"{i} is", "max_tokens": 16, "temperature": 0}) + "\n" for i in range(8))
    (tmp_path / "in.jsonl").write_text(rows)
    command = [sys.executable, "-m", "coremill.tools", "run", "in.jsonl", "-m", str(smollm2_pack), "-o", "out.jsonl"]
    command += ["--workers", "1", "--profile", "--stats", "stats.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    spent = json.loads((tmp_path / "stats.json").read_text())["cpu_seconds"]
    assert set(spent) == {"coordinator", "text_helper", "workers"}
    assert spent["coordinator"] > 0 and len(spent["workers"]) == 1 and spent["workers"][0] > 0
    for process in ("coordinator", "text helper", "worker 0"):
        assert f"coremill: {process:20} " in done.stderr
    assert "coremill: ffn_down " in done.stderr
