"""Loss of power: of everything that was written, only what had been synced is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coremill.coordinator.queue.store import Store

HERE = Path(__file__).parent
WAIT = 60


@pytest.fixture(scope="module")
def shim(tmp_path_factory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "synced.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, HERE / "synced.c", "-ldl"], check=True)
    return library


def lose_power(path: Path) -> None:
    """After the kill of whoever wrote: each file as it was when it was last synced, or not at all."""
    for file in (path, path.with_name(f"{path.name}-wal")):
        copy = file.with_name(f"{file.name}.synced")
        file.unlink(missing_ok=True)
        if copy.exists():
            copy.rename(file)


WRITER = """
import sys
from coremill.coordinator.queue.store import Store
store = Store(sys.argv[1])
for n in range(10**6):
    with store.transaction():
        store.add(f"id-{n}", b"", 0, None, "{}" * 200, "{}")
    print(n, flush=True)
"""


@pytest.mark.parametrize("after", [0, 1, 30, 700])  # the last: beyond what a log holds before it is written back
def test_what_has_been_committed_is_there(shim, tmp_path, after):
    path = tmp_path / "jobs.sqlite"
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    command = [sys.executable, "-c", WRITER, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    last = -1
    for line in process.stdout:
        last = int(line)
        if last == after:
            process.kill()
    process.wait()
    lose_power(path)
    store = Store(path)
    ids = [row.id for row in store.begin(10**7)]
    store.close()
    assert len(ids) > last >= after and ids == [f"id-{n}" for n in range(len(ids))]


def test_accepted_jobs_and_told_outcomes_are_there(shim, tiny_pack, tmp_path, coordinator):
    path = tmp_path / "jobs.sqlite"
    environment = {**os.environ, "LD_PRELOAD": str(shim), "FAKE_STEP_SECONDS": "0.002"}
    command = [sys.executable, str(HERE / "host.py"), str(tiny_pack), str(path), "produce"]
    host = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    accepted, done = [], {}
    for line in host.stdout:
        kind, id, *text = line.rstrip("\n").split(" ", 2)
        if kind == "accepted":
            accepted.append(id)
        else:
            done[id] = text[0]
        if len(done) == 30 and host.poll() is None:
            host.kill()
    host.wait()
    lose_power(path)
    c = coordinator(fake=True, queue=path, ctx=400)
    assert c.stats()["queue"]["kept"]["done"] >= len(done) >= 30
    assert c.drain(WAIT)
    read = {job.id: job.result(0).text for job in c.results(timeout=0)}
    assert set(accepted) <= read.keys() and done.items() <= read.items()
