"""The command in small boxes, real ones: control groups, a mount namespace, filters of system calls. It works, or it
says why not. What needs root and is refused here is tried on trees that look like it in tests/config."""

from __future__ import annotations

import os
import sys
import time
import uuid
from pathlib import Path

import pytest

from coremill.config.topology import survey

BOX = (sys.executable, str(Path(__file__).with_name("box.py")))
GROUPS = Path("/sys/fs/cgroup")


def boxed(*what: object) -> tuple[str, ...]:
    return (*BOX, *map(str, what), "--")


class Groups:
    """Control groups (version 1) that are made for a test and removed after it."""

    def __init__(self) -> None:
        self._made: list[Path] = []

    def __call__(self, controller: str, *levels: dict[str, object]) -> Path:
        """A chain of groups with these files; the innermost."""
        folder = GROUPS / controller
        for files in levels:
            folder = folder / f"coremill-test-{uuid.uuid4().hex[:12]}"
            try:
                folder.mkdir()
                self._made.append(folder)
                for name, value in files.items():
                    (folder / name).write_text(f"{value}\n")
            except OSError as error:
                pytest.skip(f"control groups cannot be made here ({error})")
        return folder

    def close(self) -> None:
        for folder in reversed(self._made):
            folder.rmdir()


@pytest.fixture
def groups():
    made = Groups()
    yield made
    made.close()


@pytest.fixture(scope="module")
def rows(workload):
    chosen = [*workload("write")[:6], *workload("label")[:6]]
    for row in chosen:
        row["body"]["max_tokens"] = 12
    return chosen


@pytest.fixture(scope="module")
def free(rows, make_runs):
    """Results of a run in no box."""
    return make_runs().fresh(rows)


@pytest.fixture
def runs(rows, make_runs):
    made = make_runs()
    made.write(rows)
    return made


def quota(share: float) -> dict[str, object]:
    return {"cpu.cfs_period_us": 100000, "cpu.cfs_quota_us": int(share * 100000)}


@pytest.mark.parametrize(("shares", "shown"), [([0.5], "0.5"), ([1.0, None], "1"), ([0.6, None, None], "0.6")])
def test_cpu_quota(runs, free, groups, shares, shown):
    """Below a core; on a parent; both."""
    folder = groups("cpu", *({} if share is None else quota(share) for share in shares))
    asked = runs.run("--workers", "2", status=2, inside=boxed(f"cgroup={folder}"))
    assert "only 1" in asked and f"cgroup quota of {shown} CPUs" in asked
    said = runs.run(inside=boxed(f"cgroup={folder}"))
    assert runs.results() == free
    assert len(runs.stats()["workers"]) == 1
    assert survey().budget == 1 or f"cgroup quota of {shown} CPUs" in said


def test_cpuset_of_one_cpu(runs, free, groups):
    cpu = survey().places[-1].cpu
    folder = groups("cpuset", {"cpuset.mems": 0, "cpuset.cpus": cpu})
    runs.run(inside=boxed(f"cgroup={folder}"))
    assert runs.results() == free
    assert [worker["cores"] for worker in runs.stats()["workers"]] == [[cpu]]


def test_small_shared_memory(runs, free):
    """The arena is no file in /dev/shm and may be larger than it."""
    try:
        runs.run("--arena", "256M", inside=boxed("small-shm"))
    except AssertionError as error:
        if "PermissionError" in str(error):
            pytest.skip("mount namespaces cannot be made here")
        raise
    assert runs.results() == free


def test_no_huge_pages(runs, free):
    runs.run(inside=boxed("no-huge-pages"))
    assert runs.results() == free


def test_refused_memfd(runs):
    said = runs.run(status=1, inside=boxed("deny=memfd_create"))
    assert "memfd_create: Operation not permitted; shared memory is needed" in said
    assert runs.processes_after_a_second() == [] and list(runs.temporary.iterdir()) == []


def test_refused_affinity(runs, free):
    """Who may not choose a CPU can still run where it has no choice."""
    cpus = [place.cpu for place in survey().places]
    if len(cpus) > 1:
        said = runs.run(status=1, inside=boxed("deny=sched_setaffinity"))
        assert "pinning worker 0 to CPUs" in said
        assert runs.processes_after_a_second() == [] and list(runs.temporary.iterdir()) == []
    one = ("taskset", "-c", str(cpus[0]))
    runs.run(inside=(*one, *boxed("deny=sched_setaffinity")))
    assert runs.results() == free


def test_memory_limit(runs, free, groups):
    """What does not fit is refused with the sum; what is suggested then fits."""
    folder = groups("memory", {"memory.limit_in_bytes": 300 << 20})
    inside = boxed(f"cgroup={folder}")
    said = runs.run("--workers", "1", "--arena", "1G", status=2, inside=inside)
    assert "not enough memory: weights" in said and str(folder) in said
    arena = said.partition("this would fit: --arena ")[2].split()[0].rstrip(",")
    runs.run("--workers", "1", "--arena", arena, inside=inside)
    assert runs.results() == free


def test_memory_limit_below_everything(runs, groups):
    folder = groups("memory", {"memory.limit_in_bytes": 150 << 20})
    said = runs.run("--workers", "1", status=2, inside=boxed(f"cgroup={folder}"))
    assert "no setting fits" in said


def test_untouched_blocks_cost_nothing(runs):
    """The arena is as large as the machine allows, and little of it is there."""
    runs.run("--workers", "1", "--arena", "2G")
    stats = runs.stats()
    (worker,) = stats["workers"]
    assert stats["arena"]["blocks"] * stats["arena"]["block_bytes"] > 1.9e9
    assert 0 < worker["pss_arena_bytes"] < 120e6
    assert os.path.getsize(runs.out) > 0


def test_a_worker_killed_for_want_of_memory(make_runs, workload, groups):
    """By the kernel: it is moved into a group that is full at once, and the blocks it touches next count there. What it
    ran goes on elsewhere, nobody is charged."""
    chosen = workload("write")[:24]
    for row in chosen:
        row["body"]["max_tokens"] = 60
    expected = make_runs().fresh(chosen)
    runs = make_runs()
    runs.write(chosen)
    folder = groups("memory", {"memory.limit_in_bytes": 1 << 20})
    process = runs.start("--max-active", "4")  # most rows have yet to begin, in blocks that nobody has touched
    deadline = time.monotonic() + 120
    while runs.num_rows() < 1:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    victim = next(pid for pid in runs.processes() if "coremill.worker" in Path(f"/proc/{pid}/cmdline").read_text())
    (folder / "cgroup.procs").write_text(f"{victim}\n")
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    assert said.count("died: killed by SIGKILL (memory had run out, says the kernel)") == 1, said
    assert runs.results() == expected
    assert not runs.errors.exists()
