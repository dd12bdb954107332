"""What type checkers make of us: the Python interface is typed for those who use it, and within itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

PROGRAM = """
import coremill
from coremill.coordinator import AsyncCoordinator, Completion, Coordinator, Failure, Job, Reject, Result, Retry


def check(result: Result) -> int:
    if not result.text:
        raise Retry("empty", temperature=1.0)
    if result.finish_reason == "length":
        raise Reject("cut off")
    return len(result.token_ids)


def blocking(c: Coordinator) -> list[str]:
    job: Job = c.submit("a", max_tokens=3, stop=["x"], timeout=5, priority=1)
    pieces: list[str] = [piece for piece in job]
    done: Completion = job.result(3.0)
    for outcome in c.map(["a", {"prompt": "b"}], hook=check, errors="return"):
        if isinstance(outcome, Failure):
            print(outcome.error.code)
        else:
            print(outcome.value, outcome.index, outcome.usage.total_tokens)
    return [*pieces, done.text, c.apply_template([{"role": "user", "content": "a"}]), str(c.count_tokens("a") + 1)]


async def awaited(c: AsyncCoordinator) -> Completion:
    job = await c.submit(messages=[{"role": "user", "content": "a"}])
    async for piece in job:
        print(piece.upper())
    async for outcome in c.map(["a"]):
        print(outcome.custom_id)
    return await job


with coremill.Coordinator("smollm2", max_queue=10) as c:
    blocking(c)
"""
WRONG = """
from coremill.coordinator import Coordinator
Coordinator("smollm2").submit("a", max_tokens="3")
Coordinator("smollm2").submit("a").result().txt
"""


@pytest.fixture(scope="module")
def check(repo_root, tmp_path_factory):
    """check(options..., program=None) -> what mypy says. The package is laid out as it is installed."""
    folder = tmp_path_factory.mktemp("typing")
    package = folder / "path" / "coremill"
    package.mkdir(parents=True)
    for path in (repo_root / "top" / "coremill").iterdir():
        (package / path.name).symlink_to(path)
    for name in ("config", "native", "worker", "coordinator", "tools"):
        (package / name).symlink_to(repo_root / name)

    def run(*options: str, program: str | None = None) -> str:
        if program is not None:
            (folder / "program.py").write_text(program)
            options = (*options, "program.py")
        command = [sys.executable, "-m", "mypy", "--cache-dir", str(folder / "cache"), "--follow-imports", "silent"]
        environment = {"MYPYPATH": str(package.parent), "PATH": ""}
        done = subprocess.run([*command, *options], cwd=folder, env=environment, capture_output=True, text=True)
        return done.stdout + done.stderr

    assert Path(package, "py.typed").exists()
    return run


def test_programs_that_use_it(check):
    assert "Success" in check("--strict", program=PROGRAM)
    said = check("--strict", program=WRONG)
    assert 'expected "int | None"' in said and '"Completion" has no attribute "txt"' in said


def test_the_interface_itself(check):
    assert "Success" in check("-p", "coremill.coordinator.python")
