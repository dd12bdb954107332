"""The `coremill run` command on real rows and the default model, as a user starts it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

Row = dict[str, Any]


def counts(usage: Row) -> Row:
    """The token counts that must be the same in every run; what was found in the cache may differ."""
    return {name: count for name, count in usage.items() if name != "prompt_tokens_details"}


class Runs:
    """A folder in which one input is run. Every process started here carries a mark of its own in its environment.

    temporary: where these processes put their temporary files, and nobody else.
    """

    MARK = "SYSTEM_TEST_MARK"

    def __init__(self, folder: Path, temporary: Path, model: Path, cache: Path) -> None:
        self.folder, self.temporary = folder, temporary
        self.input, self.out, self.stats_path = folder / "in.jsonl", folder / "out.jsonl", folder / "stats.json"
        self.errors = folder / "out.errors.jsonl"
        self._model = str(model)
        self.cache = cache
        self._mark = f"{self.MARK}={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        unwanted = {name for name in os.environ if name.startswith("COREMILL_")} | {"XDG_RUNTIME_DIR"}
        self.environ = {name: value for name, value in os.environ.items() if name not in unwanted}
        self.environ |= {name: value, "TMPDIR": str(temporary), "COREMILL_CACHE": str(cache)}
        self.environ["COREMILL_DEBUG_BOOKS"] = "1"

    def write(self, rows: list[Row]) -> None:
        self.input.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def start(self, *options: str, inside: Sequence[str] = (), **environ: str) -> subprocess.Popen[str]:
        """inside: a command that runs ours."""
        command = [*inside, sys.executable, "-m", "coremill.tools", "run", str(self.input), "-m", self._model]
        command += ["-o", str(self.out), "--stats", str(self.stats_path), *options]
        return subprocess.Popen(
            command,
            env=self.environ | environ,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *options: str, status: int = 0, inside: Sequence[str] = (), **environ: str) -> str:
        """The command, which must end with this exit status; what it said."""
        process = self.start(*options, inside=inside, **environ)
        said = process.communicate(timeout=300)[1]
        assert process.returncode == status, said
        return said

    def fresh(self, rows: list[Row], *options: str, **environ: str) -> dict[str, bytes]:
        """Results of a new run of these rows."""
        for path in self.folder.glob("out.*"):
            path.unlink()
        self.write(rows)
        self.run(*options, **environ)
        made = self.results()
        assert made.keys() == {row["custom_id"] for row in rows}
        return made

    def bodies(self) -> dict[str, Row]:
        """custom_id -> response body, after checking that no row is there twice."""
        lines = [json.loads(line) for line in self.out.read_bytes().splitlines()]
        made = {line["custom_id"]: line["response"]["body"] for line in lines}
        assert len(made) == len(lines)
        return made

    def results(self) -> dict[str, bytes]:
        """custom_id -> the bytes that must be the same in every run."""
        return {
            name: json.dumps([name, body["choices"], counts(body["usage"])], ensure_ascii=False).encode()
            for name, body in self.bodies().items()
        }

    def stats(self) -> Row:
        return json.loads(self.stats_path.read_text())

    def num_rows(self) -> int:
        """Rows in the files so far."""
        return sum(path.read_bytes().count(b"\n") for path in (self.out, self.errors) if path.exists())

    def processes(self) -> list[int]:
        """Ids of all living processes that carry our mark."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:  # gone meanwhile, a zombie, or somebody else's
                continue
        return found

    def processes_after_a_second(self) -> list[int]:
        deadline = time.monotonic() + 1
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left


@pytest.fixture(scope="session")
def workload(repo_root: Path) -> Callable[[str], list[Row]]:
    """Rows of tests/data/workloads: label (a shared prefix), read (long documents), write (short chats)."""

    def rows(name: str) -> list[Row]:
        path = repo_root / "tests/data/workloads" / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    return rows


class RunsMaker:
    """Makes folders for runs, and takes their temporary ones away."""

    def __init__(self, folder: Path, model: Path, cache: Path) -> None:
        self._folder, self._model, self._cache = folder, model, cache
        self._made: list[Runs] = []

    def __call__(self, cache: Path | None = None, model: Path | None = None) -> Runs:
        """cache: of packed models, when it shall not be the one that the tests share. model: not the default one."""
        folder = self._folder / str(len(self._made))
        folder.mkdir()
        # A socket's path has few bytes, so what it lies in must have a short name.
        temporary = Path(tempfile.mkdtemp(prefix="cm-"))
        self._made.append(Runs(folder, temporary, model or self._model, cache or self._cache))
        return self._made[-1]

    def close(self) -> None:
        for runs in self._made:
            shutil.rmtree(runs.temporary)


@pytest.fixture(scope="module")
def make_runs(tmp_path_factory, smollm2_gguf: Path, smollm2_pack: Path, model_folder: Path) -> Iterator[RunsMaker]:
    """make_runs() -> Runs in a folder of its own, on the default model, which is packed already."""
    maker = RunsMaker(tmp_path_factory.mktemp("system"), smollm2_gguf, model_folder / "packs")
    yield maker
    maker.close()
