"""Before a resume: what is refused, and when there is nothing to do."""

import gzip

import pytest

from coremill.config.errors import ResumeRefusedError, RunError
from coremill.config.request import SamplingParams
from coremill.coordinator.batch import standing
from coremill.coordinator.batch.feeder import Rules
from coremill.coordinator.batch.rowtable import IN_ERRORS, IN_RESULTS, SEEN, RowTable
from coremill.coordinator.batch.writer import ResultFiles

RULES = Rules(frozenset({"default"}), 100, SamplingParams())


def prompts(num, text="prompt"):
    return [{"custom_id": f"row-{i}", "prompt": f"{text} {i}"} for i in range(num)]


@pytest.fixture
def check(batch):
    """check_input on what the earlier run of `batch` left behind."""

    def checking(*, path=None, format="jsonl", retry=False, keep_changed=False, keep=0, fingerprint):
        table = RowTable()
        ResultFiles(str(batch.out), None, fingerprint, table).close()
        before = table.count(IN_RESULTS), table.count(IN_ERRORS)
        options = {"retry": retry, "keep_changed": keep_changed, "keep": keep}
        outcome = standing.check_input(str(path or batch.input), format, "OUT", table, RULES, **options)
        assert (table.count(IN_RESULTS), table.count(IN_ERRORS), table.count(SEEN)) == (*before, 0)
        return outcome

    return lambda **options: checking(fingerprint=batch.fingerprint, **options)


def test_nothing_to_do(batch, check, fake_engine):
    batch.write([*prompts(3), "bad", *prompts(1)])
    batch.run(engine=fake_engine(fail=frozenset({"row-1"})))
    outcome = check(keep=2)
    assert outcome.idle and [row.custom_id for row in outcome.first] == ["row-0", "row-1"]
    progress = outcome.progress
    assert (progress.num_read, progress.num_skipped, outcome.results_before, outcome.errors_before) == (5, 5, 2, 3)
    assert check(retry=True) is None
    batch.write([*prompts(4), "bad"])
    assert check() is None


def test_changed_rows_are_refused_by_name(batch, check):
    batch.write(prompts(8))
    batch.run()
    batch.write([*prompts(2), *prompts(8, "other")[2:]])
    with pytest.raises(
        ResumeRefusedError, match=r"6 rows .* line 3 \('row-2'\).*, \.\.\..*line from OUT.*--keep-changed"
    ):
        check()
    outcome = check(keep_changed=True)
    assert outcome.idle and outcome.num_changed == 6


def test_lines_of_text_that_moved_are_refused(batch, check):
    batch.input = batch.folder / "in.txt"
    batch.write(b"one\ntwo\n")
    batch.run(format="text")
    batch.write(b"zero\none\ntwo\n")
    with pytest.raises(ResumeRefusedError, match="line number"):
        check(format="text")


def test_failed_rows_may_be_corrected_for_a_retry(batch, check):
    batch.write([*prompts(2), {"custom_id": "x", "prompt": "y", "nonsense": 1}])
    batch.run()
    batch.write([*prompts(2), {"custom_id": "x", "prompt": "y"}])
    with pytest.raises(ResumeRefusedError, match="--retry-errors"):
        check()
    assert check(retry=True) is None


def test_another_input_is_refused(batch, check):
    batch.write(prompts(3))
    batch.run()
    other = batch.folder / "other.jsonl"
    batch.write([{"prompt": "x"}] * 5, "other.jsonl")
    with pytest.raises(ResumeRefusedError, match=r"3 finished rows, of which .* has none"):
        check(path=other)
    batch.write(["bad"])
    batch.out.unlink()
    batch.run()
    batch.write([{"custom_id": "a", "prompt": "x"}], "other.jsonl")
    assert check(path=other, retry=True) is None


def test_an_input_that_breaks_off_is_run_as_far_as_it_goes(batch, check):
    path = batch.folder / "in.jsonl.gz"
    batch.write(
        gzip.compress(b"".join(b'{"custom_id": "row-%d", "prompt": "x"}\n' % i for i in range(3)))[:-4], path.name
    )
    with pytest.raises(RunError, match="after line 3"):
        batch.run(input=path)
    with pytest.raises(RunError, match="after line 3: the gzip data ends too early"):
        check(path=path)
    batch.out.write_bytes(batch.out.read_bytes().splitlines(keepends=True)[0])
    assert check(path=path) is None


def test_a_long_input_is_not_read_to_its_end(batch, check, monkeypatch):
    batch.write(prompts(20))
    batch.run()
    monkeypatch.setattr(standing, "MAX_LINES", 30)
    batch.write([*prompts(50), {"custom_id": "row-3", "prompt": "changed"}])
    assert check() is None
    batch.write([*[{"custom_id": f"new-{i}", "prompt": "x"} for i in range(50)], *prompts(20, "changed")])
    with pytest.raises(ResumeRefusedError):
        check()
