"""A batch run with a make-believe engine: everything but models and processes."""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coremill.config.errors import EngineClosedError, RequestError
from coremill.config.request import SamplingParams, SequenceRequest, SequenceResult
from coremill.coordinator.batch.feeder import Rules
from coremill.coordinator.batch.reader import LineReader
from coremill.coordinator.batch.results import LineMaker
from coremill.coordinator.batch.rowtable import RowTable
from coremill.coordinator.batch.runner import Outcome, Reporter, Runner
from coremill.coordinator.batch.source import open_source
from coremill.coordinator.batch.writer import ResultFiles

NO_DEFAULTS = SamplingParams()
CTX = 100


def prepare(requests):
    """One token per byte; messages are joined with their roles."""
    prepared = []
    for request in requests:
        if isinstance(request.prompt, tuple):
            prepared.append(request.prompt)
            continue
        text = request.prompt
        if text is None:
            text = "".join(f"<{message['role']}>{message['content']}" for message in request.messages)
        prepared.append(
            RequestError("template_error", "the template says no", "messages")
            if "bad template" in text
            else tuple(text.encode())
        )
    return prepared


class FakeEngine:
    """Answers from its own thread, in a random order, with a text that depends on the request alone.

    slots: answers held back until so many wait (or nothing else comes); fail: keys whose rows fail.
    """

    def __init__(self, *, slots: int = 4, seed: int = 0, fail: frozenset[str] = frozenset(), delay: float = 0.0):
        self._slots, self._random, self._delay = slots, random.Random(seed), delay
        self.fail = fail
        self.submitted: list[SequenceRequest] = []
        self.most_waiting = 0
        self._waiting: list = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, request: SequenceRequest, on_done) -> int:
        with self._changed:
            if self._closed:
                raise EngineClosedError("closed")
            self.submitted.append(request)
            self._waiting.append((request, on_done))
            self.most_waiting = max(self.most_waiting, len(self._waiting))
            self._changed.notify()
            return len(self.submitted)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        for request, on_done in self._waiting:
            on_done(SequenceResult(request.key, error=RequestError("engine_closed", "the engine was closed")))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    return
                if len(self._waiting) < self._slots:
                    self._changed.wait(0.002)
                if self._closed:
                    return
                request, on_done = self._waiting.pop(self._random.randrange(len(self._waiting)))
            if self._delay:
                time.sleep(self._delay)
            on_done(self.answer(request))

    def answer(self, request: SequenceRequest) -> SequenceResult:
        if request.key in self.fail:
            return SequenceResult(request.key, error=RequestError("nonfinite", "the logits are not finite"), worker=0)
        text = f"{bytes(token % 256 for token in request.prompt_ids)[-8:].hex()}-{request.seed % 1000}"
        return SequenceResult(
            request.key, list(text.encode()), text, "length", worker=0, queued_s=0.1, prefill_s=0.2, decode_s=0.3
        )


@dataclass
class Ran:
    outcome: Outcome
    engine: FakeEngine
    files: ResultFiles
    plans: list = field(default_factory=list)


class Recorder(Reporter):
    def __init__(self) -> None:
        self.plans: list = []
        self.snapshots = 0

    def plan(self, plan, num_rows, num_skipped) -> None:
        self.plans.append((plan, num_rows, num_skipped))

    def progress(self, progress) -> None:
        self.snapshots += 1


FINGERPRINT = {"model": "abc", "kv": "f16", "ctx": CTX, "seed": 0, "temperature": 1.0, "format": "jsonl"}


class Batch:
    """A folder with in.jsonl, out.jsonl and its friends, and `run()` for the command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fingerprint = FINGERPRINT
        self.input = folder / "in.jsonl"
        self.out = folder / "out.jsonl"
        self.errors = folder / "out.errors.jsonl"
        self.journal = folder / "out.jsonl.journal"
        self.waiting = folder / "out.jsonl.waiting"

    def write(self, rows, name: str | None = None) -> None:
        data = (
            rows
            if isinstance(rows, bytes)
            else "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
        )
        (self.folder / name if name else self.input).write_bytes(data)

    def run(
        self,
        *,
        engine: FakeEngine | None = None,
        fingerprint: dict | None = None,
        errors: str | None = None,
        format: str = "auto",
        defaults: SamplingParams = NO_DEFAULTS,
        run_seed: int = 0,
        limit: int = 1 << 20,
        input: Path | None = None,
        reporter: Reporter | None = None,
        prepare_with=prepare,
        rules: dict | None = None,
        write_hook=None,
        stats: str | None = None,
        **options,
    ) -> Ran:
        engine = engine or FakeEngine()
        recorder = reporter or Recorder()
        table = RowTable()
        source = open_source(str(input or self.input))
        try:
            files = ResultFiles(
                str(self.out), errors, {**FINGERPRINT, **(fingerprint or {})}, table,
                input_identity=source.identity, stats=stats,
            )  # fmt: skip
            with files:
                if write_hook is not None:
                    files.write = write_hook(files.write)
                asked = {"models": frozenset({"default", "fake"}), "ctx": CTX, "defaults": defaults}
                rules = Rules(**{**asked, "run_seed": run_seed, **(rules or {})})
                runner = Runner(
                    LineReader(source, format, limit=limit), files, table, rules, LineMaker("fake", "fp_0"),
                    prepare=prepare_with, submit=engine.submit, reporter=recorder, interrupt_input=source.interrupt,
                    **options,
                )  # fmt: skip
                outcome = runner.run()
        finally:
            source.close()
            engine.close()
        return Ran(outcome, engine, files, getattr(recorder, "plans", []))

    def results(self) -> list[dict]:
        return self._lines(self.out)

    def failures(self) -> list[dict]:
        return self._lines(self.errors)

    def answers(self) -> dict[str, str]:
        """custom_id -> text, after checking that no row is there twice."""
        rows = self.results()
        made = {row["custom_id"]: row["response"]["body"]["choices"][0] for row in rows}
        assert len(made) == len(rows)
        return {key: choice.get("text", choice.get("message", {}).get("content")) for key, choice in made.items()}

    @staticmethod
    def _lines(path: Path) -> list[dict]:
        if not path.exists():
            return []
        data = path.read_bytes()
        assert data == b"" or data.endswith(b"\n")
        return [json.loads(line) for line in data.splitlines()]


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


@pytest.fixture(scope="session")
def batch_class() -> type[Batch]:
    return Batch


@pytest.fixture(scope="session")
def fake_engine() -> type[FakeEngine]:
    return FakeEngine


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()
