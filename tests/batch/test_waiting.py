"""Rows that --in-order holds back survive the death of a run."""

from __future__ import annotations

import pytest

from coremill.config.errors import RunError
from coremill.coordinator.batch.writer import ResultFiles


class Crash(BaseException):
    pass


def prompts(count, first=0):
    return [{"custom_id": f"row-{i}", "prompt": f"text {i}"} for i in range(first, first + count)]


@pytest.fixture
def died(batch, fake_engine, monkeypatch):
    """A run in input order of 60 rows, one of which fails, that died with at least ten rows waiting; (their custom_ids,
    those that were written)."""
    batch.write(prompts(60))
    real, ids = ResultFiles.hold, set()

    def hold(self, records):
        real(self, records)
        ids.update(line.split(b'"custom_id":"')[1].split(b'"')[0].decode() for line in (r.line for r in records))
        if len(ids) >= 30:
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(ResultFiles, "hold", hold)
        # The dead do not tidy up.
        patch.setattr("os.unlink", lambda path: None)
        with pytest.raises(Crash):
            batch.run(engine=fake_engine(slots=40, fail=frozenset({"row-3"})), in_order=True)
    written = {row["custom_id"] for row in batch.results() + batch.failures()}
    assert len(ids - written) >= 10
    return ids - written, written


def submitted(ran):
    return {request.key for request in ran.engine.submitted}


@pytest.mark.parametrize("in_order", [True, False])
def test_they_are_not_run_again(batch, fake_engine, died, in_order):
    waited, written = died
    ran = batch.run(engine=fake_engine(fail=frozenset({"row-3"})), in_order=in_order)
    assert submitted(ran) == {f"row-{i}" for i in range(60)} - waited - written
    assert set(batch.answers()) == {f"row-{i}" for i in range(60) if i != 3}
    assert [row["error"]["code"] for row in batch.failures()] == ["nonfinite"]
    if in_order:
        assert [row["custom_id"] for row in batch.results()] == [f"row-{i}" for i in range(60) if i != 3]
    if "row-3" in waited:
        assert ran.outcome.error_codes == {"nonfinite": 1} and ran.outcome.failures[0].custom_id == "row-3"
    assert not batch.waiting.exists()


def test_a_row_that_changed_runs_again(batch, died):
    waited, _ = died
    changed = max(waited, key=lambda name: int(name.split("-")[1]))
    batch.write([row | ({"max_tokens": 3} if row["custom_id"] == changed else {}) for row in prompts(60)])
    assert changed in submitted(batch.run(in_order=True))
    assert len(batch.answers()) + len(batch.failures()) == 60


def test_rows_that_are_gone_are_forgotten(batch, died):
    waited, _ = died
    batch.write([row for row in prompts(60) if row["custom_id"] not in waited])
    batch.run(in_order=True)
    assert not waited & set(batch.answers()) and not batch.waiting.exists()


def test_failures_run_again_on_request(batch, died):
    waited, written = died
    ran = batch.run(in_order=True, retry=True)
    assert submitted(ran) == {f"row-{i}" for i in range(60)} - waited - written | {"row-3"}
    assert batch.failures() == [] and len(batch.answers()) == 60


def test_other_settings_forget_them(batch, died):
    """As long as nothing is in OUT; else the run is refused, as it always was."""
    batch.out.unlink()
    batch.errors.unlink(missing_ok=True)
    ran = batch.run(fingerprint={"seed": 5}, in_order=True)
    assert len(ran.engine.submitted) == 60 and len(batch.answers()) == 60


def test_torn_at_any_byte(batch, died):
    waited, written = died
    whole, out = batch.waiting.read_bytes(), batch.out.read_bytes()
    errors = batch.errors.read_bytes() if batch.errors.exists() else b""
    for length in (0, 5, 60, len(whole) // 2, len(whole) - 1):
        batch.waiting.write_bytes(whole[:length])
        batch.out.write_bytes(out)
        batch.errors.write_bytes(errors)
        ran = batch.run(in_order=True)
        assert submitted(ran) >= {f"row-{i}" for i in range(60)} - waited - written
        assert len(batch.answers()) + len(batch.failures()) == 60


@pytest.mark.parametrize("name", ["out.jsonl.waiting", "out.jsonl.waiting.new"])
def test_a_strangers_file_is_left_alone(batch, fake_engine, name):
    batch.write(prompts(60))
    (batch.folder / name).write_text("somebody's notes\n")
    with pytest.raises(RunError, match=f"{name} is not of coremill's making"):
        batch.run(engine=fake_engine(slots=40), in_order=True)
    assert (batch.folder / name).read_text() == "somebody's notes\n"


def test_the_file_does_not_grow_with_the_run(batch, fake_engine, monkeypatch):
    monkeypatch.setattr("coremill.coordinator.batch.waiting._SLACK_BYTES", 4000)
    sizes, real = [], ResultFiles.write

    def write(self, records):
        real(self, records)
        sizes.append(batch.waiting.stat().st_size if batch.waiting.exists() else 0)

    monkeypatch.setattr(ResultFiles, "write", write)
    batch.write(prompts(600))
    batch.run(engine=fake_engine(slots=40), in_order=True, window_rows=50)
    assert 0 < max(sizes) < batch.out.stat().st_size / 2
    assert not batch.waiting.exists()
