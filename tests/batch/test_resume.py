"""The same command again: what is skipped, what runs, what is refused, what is repaired."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coremill.config.errors import EngineError, RequestError, ResumeRefusedError, RunError
from coremill.coordinator.batch.summary import summary_lines


def prompts(num, first=0):
    return [{"custom_id": f"row-{i}", "prompt": f"prompt {i}"} for i in range(first, first + num)]


class Crash(Exception):
    """Stands for the death of the process."""


def crash_after(num_bytes):
    """Replaces os.write: the process dies once so many bytes have reached files, in the middle of a write."""
    real, left = os.write, num_bytes

    def write(fd, data):
        nonlocal left
        if left < len(data):
            real(fd, bytes(data[: max(0, left)]))
            left = 0
            raise Crash
        left -= len(data)
        return real(fd, data)

    return write


def crash(batch, monkeypatch, num_bytes, **options):
    """A run that dies after `num_bytes` bytes of output; True when it did not get that far."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", crash_after(num_bytes))
        patched.setattr(os, "unlink", lambda path: None)  # the dead do not tidy up
        try:
            batch.run(**options)
        except Crash:
            return False
    return True


def test_again_does_nothing(batch):
    batch.write(prompts(50))
    batch.run()
    before = batch.out.read_bytes()
    ran = batch.run()
    assert ran.engine.submitted == [] and batch.out.read_bytes() == before
    assert (ran.outcome.progress.num_skipped, ran.outcome.results_before) == (50, 50)


def test_appended_input_is_picked_up(batch):
    batch.write(prompts(20))
    batch.run()
    batch.write(prompts(30))
    assert len(batch.run().engine.submitted) == 10
    assert len(batch.answers()) == 30


def test_rows_may_move_within_the_input(batch):
    batch.write(prompts(20))
    batch.run()
    batch.write([*prompts(5, first=20), *reversed(prompts(20))])
    ran = batch.run()
    assert len(ran.engine.submitted) == 5 and ran.outcome.num_changed == 0


def test_error_rows_are_skipped_or_retried(batch, fake_engine):
    batch.write([*prompts(10), "bad", {"custom_id": "row-3", "prompt": "again"}])
    failing = frozenset({"row-1", "row-2"})
    batch.run(engine=fake_engine(fail=failing))
    assert {row["error"]["line"] for row in batch.failures()} == {2, 3, 11, 12}
    before = batch.errors.read_bytes()
    ran = batch.run(engine=fake_engine())
    assert ran.engine.submitted == [] and batch.errors.read_bytes() == before
    assert ran.outcome.errors_before == 4
    ran = batch.run(engine=fake_engine(fail=frozenset({"row-1"})), retry=True)
    assert {request.key for request in ran.engine.submitted} == {"row-1", "row-2"}
    assert {row["error"]["line"] for row in batch.failures()} == {2, 11, 12}
    assert len(batch.answers()) == 9
    assert (ran.outcome.progress.num_results, ran.outcome.progress.num_errors) == (1, 3)


def test_a_retry_that_dies_at_once_loses_no_row(batch, fake_engine, monkeypatch):
    batch.write(prompts(10))
    batch.run(engine=fake_engine(fail=frozenset({"row-1", "row-2"})))
    assert not crash(batch, monkeypatch, 0, retry=True)
    batch.run()
    assert len(batch.answers()) == 10 and batch.failures() == []


def test_rows_corrected_after_an_error(batch):
    batch.write([*prompts(3), {"custom_id": "x", "prompt": "y", "nonsense": 1}])
    batch.run()
    batch.write([*prompts(3), {"custom_id": "x", "prompt": "y"}])
    assert batch.run().outcome.changed == [(4, "x")]
    batch.run(retry=True)
    assert "x" in batch.answers() and batch.failures() == []


def test_changed_rows_are_reported_and_keep_their_results(batch):
    batch.write(prompts(40))
    batch.run()
    before = batch.answers()
    batch.write([{**row, "prompt": "other"} if i < 30 else row for i, row in enumerate(prompts(40))])
    ran = batch.run()
    assert ran.outcome.num_changed == 30
    assert ran.outcome.changed == [(i + 1, f"row-{i}") for i in range(20)]
    assert batch.answers() == before


def test_rows_gone_from_the_input_are_counted(batch, fake_engine):
    batch.write(prompts(10))
    batch.run(engine=fake_engine(fail=frozenset({"row-8"})))
    batch.write(prompts(5))
    assert batch.run().outcome.num_gone == 5
    outcome = batch.run(retry=True).outcome
    assert (outcome.num_gone, outcome.num_dropped_errors) == (4, 1)


def test_a_removed_result_runs_again(batch):
    batch.write(prompts(5))
    batch.run()
    lines = batch.out.read_bytes().splitlines(keepends=True)
    batch.out.write_bytes(b"".join(lines[:2] + lines[3:]))
    assert len(batch.run().engine.submitted) == 1
    assert len(batch.answers()) == 5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "other"}, r"model's content was \"abc\" and is \"other\""),
        ({"kv": "q8"}, "--kv"),
        ({"ctx": 50}, "--ctx was 100 and is 50"),
        ({"seed": 1}, "--seed was 0 and is 1"),
        ({"temperature": 0.0}, "--temperature was 1.0 and is 0.0"),
        ({"top_p": 0.5}, "--top-p was not set and is 0.5"),
        ({"template": "x"}, "chat template"),
        ({"numerics": 2}, "numerics version"),
        ({"format": "text"}, "format"),
    ],
)
def test_other_settings_are_refused_by_name(batch, change, named):
    batch.write(prompts(3))
    batch.run()
    before = batch.out.read_bytes(), batch.journal.read_bytes()
    with pytest.raises(ResumeRefusedError, match=named):
        batch.run(fingerprint=change)
    assert (batch.out.read_bytes(), batch.journal.read_bytes()) == before


def test_settings_that_change_no_token_may_change(batch, fake_engine):
    batch.write(prompts(30))
    with pytest.raises(Crash):
        batch.run(write_hook=stop_after(10))
    batch.run(engine=fake_engine(slots=1, seed=9), window_rows=7, in_order=True)
    assert len(batch.answers()) == 30


def test_nothing_finished_means_any_settings_will_do(batch):
    batch.write(b"")
    batch.run()
    batch.write(prompts(3))
    batch.run(fingerprint={"seed": 5})
    assert len(batch.answers()) == 3
    batch.out.unlink()
    batch.run(fingerprint={"seed": 6})
    assert len(batch.answers()) == 3


def stop_after(num_rows):
    """Wraps ResultFiles.write: dies before the write that would exceed so many rows."""

    def hook(write):
        written = 0

        def writing(records):
            nonlocal written
            room = num_rows - written
            write(records[:room])
            written += len(records[:room])
            if len(records) > room:
                raise Crash

        return writing

    return hook


@pytest.mark.parametrize("which", ["out", "errors", "journal"])
def test_torn_last_line_at_every_byte(batch, fake_engine, which):
    rows = [{"custom_id": "fail-é", "prompt": "z"}, *prompts(2)]
    engine = {"fail": frozenset({"fail-é"})}
    batch.write(rows)
    batch.run(engine=fake_engine(**engine), in_order=True)
    whole = {path: path.read_bytes() for path in (batch.out, batch.errors, batch.journal)}
    answers, failures = batch.answers(), batch.failures()
    torn = getattr(batch, which)
    last = len(whole[torn]) - len(whole[torn].splitlines(keepends=True)[-1])
    for length in range(last, len(whole[torn]) + 1):
        for path, data in whole.items():
            path.write_bytes(data[:length] if path == torn else data)
        ran = batch.run(engine=fake_engine(**engine))
        assert batch.answers() == answers
        assert ran.files.repaired == ([] if length in (last, len(whole[torn])) else [str(torn)])
        assert [row["error"] for row in batch.failures()] == [row["error"] for row in failures]
        assert ran.outcome.num_changed == 0
        assert len(ran.engine.submitted) == (0 if which == "journal" or length == len(whole[torn]) else 1)


def test_zeros_at_the_end_as_a_power_cut_leaves_them(batch):
    batch.write(prompts(5))
    batch.run()
    for path in (batch.out, batch.journal):
        with open(path, "ab") as file:
            file.write(bytes(5000))
    ran = batch.run()
    assert ran.engine.submitted == [] and len(batch.answers()) == 5
    batch.write(prompts(8))
    batch.run()
    assert len(batch.answers()) == 8


def test_rows_whose_record_is_lost_are_kept_and_counted(batch):
    batch.write(prompts(5))
    batch.run()
    header = batch.journal.read_bytes().splitlines(keepends=True)[0]
    batch.journal.write_bytes(header)
    assert batch.run().outcome.num_unrecorded == 5


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, batch_class, fake_engine):
    """Input with good, bad and failing rows, and what a run that nobody disturbs makes of it."""
    batch = batch_class(tmp_path_factory.mktemp("undisturbed"))
    rows = [*prompts(12), "bad", {"custom_id": "row-2", "prompt": "twice"}, {"custom_id": "f", "prompt": "fails"}]
    batch.write(rows)
    batch.run(engine=fake_engine(fail=frozenset({"f"})))
    size = sum(path.stat().st_size for path in (batch.out, batch.errors, batch.journal))
    return rows, batch.answers(), sorted((row["id"], row["error"]["code"]) for row in batch.failures()), size


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.booleans()), min_size=1, max_size=4))
def test_random_interruptions_then_resume_is_one_run(undisturbed, tmp_path_factory, fake_engine, batch_class, deaths):
    """deaths: (share of the output after which the process dies, --in-order, --retry-errors) of each run."""
    rows, answers, failures, size = undisturbed
    batch = batch_class(tmp_path_factory.mktemp("crashes"))
    batch.write(rows)
    for number, (share, in_order, retry) in enumerate(deaths):
        engine = fake_engine(seed=number, fail=frozenset({"f"}))
        with pytest.MonkeyPatch.context() as patched:
            if crash(batch, patched, round(share * size), engine=engine, in_order=in_order, retry=retry):
                break
        check_nothing_twice(batch)
    batch.run(engine=fake_engine(fail=frozenset({"f"})))
    assert batch.answers() == answers
    assert sorted((row["id"], row["error"]["code"]) for row in batch.failures()) == failures


def check_nothing_twice(batch):
    """Whole lines of a run that died: no row has two."""
    ids = []
    for path in (batch.out, batch.errors):
        if path.exists():
            ids += [json.loads(line)["id"] for line in path.read_bytes().split(b"\n")[:-1]]
    assert len(ids) == len(set(ids))


def test_a_full_disk_leaves_whole_lines(batch):
    """RLIMIT_FSIZE stands for the disk: the write that hits it comes back short, then fails."""
    batch.write(prompts(200))
    program = (
        "import resource, sys; sys.path.insert(0, sys.argv[2]); from conftest import Batch; from pathlib import Path\n"
        "from coremill.config.errors import RunError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "try: Batch(Path(sys.argv[1])).run()\n"
        "except RunError as error: print(error)\n"
    )
    here = os.path.dirname(__file__)
    command = [sys.executable, "-c", program, str(batch.folder), here]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "cannot write" in done.stdout and "out.jsonl" in done.stdout and "same command" in done.stdout, done.stderr
    assert 20 < len(batch.answers()) < 100
    batch.run()
    assert len(batch.answers()) == 200


def test_files_are_for_their_owner_alone(batch, fake_engine):
    batch.write(prompts(2))
    before = os.umask(0)
    try:
        batch.run(engine=fake_engine(fail=frozenset({"row-1"})))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (batch.out, batch.errors, batch.journal)} == {0o600}


def test_two_runs_at_once_are_refused(batch, fake_engine):
    batch.write(prompts(2000))
    refused = []

    def second(write):
        def writing(records):
            if not refused:
                with pytest.raises(RunError) as caught:
                    batch.run()
                refused.append(str(caught.value))
            write(records)

        return writing

    batch.run(write_hook=second)
    assert "another run" in refused[0]
    assert len(batch.answers()) == 2000


def test_one_file_in_two_roles_is_refused(batch):
    batch.write(prompts(3))
    before = batch.input.read_bytes()
    link, twin = batch.folder / "link.jsonl", batch.folder / "twin.jsonl"
    link.symlink_to(batch.input)
    os.link(batch.input, twin)
    for path in (batch.input, link, twin):
        batch.out = path
        with pytest.raises(RunError, match="input itself"):
            batch.run()
    batch.out = batch.folder / "out.jsonl"
    with pytest.raises(RunError, match="input itself"):
        batch.run(errors=str(batch.input))
    for errors in ("out.jsonl", "out.jsonl.journal", "./x/../out.jsonl"):
        (batch.folder / "x").mkdir(exist_ok=True)
        with pytest.raises(RunError, match="same file"):
            batch.run(errors=str(batch.folder / errors))
    for stats in (batch.input, batch.out, batch.errors, batch.journal, batch.folder / "x" / ".." / "out.jsonl"):
        with pytest.raises(RunError, match=r"--stats .* is the (input itself|same file as)"):
            batch.run(stats=str(stats))
    assert batch.input.read_bytes() == before
    batch.out.symlink_to(batch.folder / "in.jsonl.journal")
    batch.run()


def test_a_symlink_that_leads_to_itself_is_refused(batch):
    batch.write(prompts(3))
    loop = batch.folder / "loop"
    loop.symlink_to(loop)
    with pytest.raises(RunError, match=r"cannot write .*loop: Too many levels of symbolic links"):
        batch.run(errors=str(loop))
    batch.out = loop
    with pytest.raises(RunError, match=r"cannot write .*loop: Too many levels of symbolic links"):
        batch.run()
    assert sorted(path.name for path in batch.folder.iterdir()) == [batch.input.name, "loop"]


def test_foreign_files_are_left_alone(batch):
    batch.write(prompts(3))
    batch.out.write_text("my notes\n")
    with pytest.raises(RunError, match="not a result"):
        batch.run()
    assert batch.out.read_text() == "my notes\n"
    batch.out.unlink()
    batch.run()
    kept = batch.out.read_bytes()
    batch.journal.unlink()
    with pytest.raises(RunError, match="does not tell from which run"):
        batch.run()
    batch.journal.write_text("{}\n")
    with pytest.raises(RunError, match="not a journal"):
        batch.run()
    batch.journal.write_text('{"coremill_journal": 99, "fingerprint": {}}\n')
    with pytest.raises(RunError, match="version 99"):
        batch.run()
    assert batch.out.read_bytes() == kept
    batch.out.write_bytes(kept + kept)
    with pytest.raises(RunError, match="has a line already"):
        batch.run()


@pytest.mark.parametrize("content", [b"my notes", b'{"id": 5', b"[1, 2]"])
@pytest.mark.parametrize("which", ["out", "errors", "journal"])
def test_foreign_files_without_a_newline_are_left_alone(batch, which, content):
    batch.write(prompts(3))
    victim = getattr(batch, which)
    for finished in (False, True):
        victim.write_bytes(content)
        with pytest.raises(RunError, match=r"not a result|not a journal"):
            batch.run()
        assert victim.read_bytes() == content
        if not finished:
            victim.unlink()
            batch.run()


def test_a_torn_line_without_a_journal_is_left_alone(batch):
    batch.write(prompts(3))
    batch.run()
    batch.journal.unlink()
    torn = batch.out.read_bytes()[:30]
    batch.out.write_bytes(torn)
    with pytest.raises(RunError, match="does not tell from which run"):
        batch.run()
    assert batch.out.read_bytes() == torn


def test_a_line_cut_by_hand_is_no_finished_row(batch, fake_engine):
    batch.write(prompts(3))
    batch.run(engine=fake_engine(fail=frozenset({"row-1"})), in_order=True)
    for path in (batch.out, batch.errors):
        kept = path.read_bytes()
        line = kept.splitlines(keepends=True)[0]
        for damaged in (line[:100] + b"}\n", line[:-20] + b"}\n", line[:60] + line[70:], b'{"timing":null}\n', b"\n"):
            path.write_bytes(damaged + kept[len(line) :])
            with pytest.raises(RunError, match=r"line 1 of .* not a whole one"):
                batch.run()
            assert path.read_bytes() == damaged + kept[len(line) :]
        path.write_bytes(kept)
    assert batch.run().engine.submitted == []


def test_results_are_no_error_file(batch, fake_engine):
    batch.write(prompts(3))
    batch.run(engine=fake_engine(fail=frozenset({"row-1"})))
    others = {path: path.read_bytes() for path in (batch.out, batch.errors)}
    batch.out = batch.errors
    with pytest.raises(RunError, match="a failed row"):
        batch.run()
    batch.out = batch.folder / "new.jsonl"
    batch.write(prompts(3, first=10))
    for problems in (("a result", "does not tell from which run"), ("a result", "failed rows of another run")):
        for (path, content), problem in zip(others.items(), problems, strict=True):
            with pytest.raises(RunError, match=problem):
                batch.run(errors=str(path), retry=True)
            assert path.read_bytes() == content
        batch.run()  # without failures, so that its journal names an error file that is not there


def test_templates_are_told_the_time_of_the_first_run(batch):
    batch.write(prompts(3))
    batch.run()
    header = json.loads(batch.journal.read_bytes().splitlines()[0])
    told = {**header, "started": "2001-02-03T04:05:06"}
    records = batch.journal.read_bytes().splitlines(keepends=True)[1:]
    batch.journal.write_bytes(json.dumps(told).encode() + b"\n" + b"".join(records))
    assert batch.run().files.started.isoformat() == "2001-02-03T04:05:06"
    batch.journal.write_bytes(json.dumps({**header, "started": 5}).encode() + b"\n")
    with pytest.raises(RunError, match="not a journal"):
        batch.run()


def meddle(action, after=5):
    """Wraps ResultFiles.write: `action` happens once so many rows are written."""

    def hook(write):
        written = 0

        def writing(records):
            nonlocal written
            write(records)
            written, before = written + len(records), written
            if before < after <= written:
                action()

        return writing

    return hook


@pytest.mark.parametrize("which", ["out", "errors", "journal"])
@pytest.mark.parametrize("how", ["removed", "renamed", "replaced", "somebody else"])
def test_files_that_others_touch_during_the_run_are_noticed(batch, fake_engine, which, how):
    batch.write(prompts(50))
    engine = {"fail": frozenset({"row-0"})}
    victim = getattr(batch, which)
    elsewhere = batch.folder / "elsewhere"
    actions = {
        "removed": victim.unlink,
        "renamed": lambda: victim.rename(elsewhere),
        "replaced": lambda: (victim.rename(elsewhere), victim.write_bytes(elsewhere.read_bytes())),
        "somebody else": lambda: os.truncate(victim, 0),
    }
    with pytest.raises(RunError, match=f"{victim.name} .*{how.removesuffix('d')}.* during the run"):
        batch.run(engine=fake_engine(**engine, slots=1), write_hook=meddle(actions[how]), in_order=True)


def test_a_removed_output_ends_the_run_soon(batch, fake_engine, monkeypatch):
    monkeypatch.setattr("coremill.coordinator.batch.writer.SYNC_SECONDS", 0.01)
    batch.write(prompts(2000))
    engine = fake_engine(delay=0.005)
    with pytest.raises(RunError, match=r"out\.jsonl was removed"):
        batch.run(engine=engine, write_hook=meddle(batch.out.unlink))
    assert len(engine.submitted) < 1000
    batch.run()
    assert len(batch.answers()) == 2000


def test_runs_that_fail_before_the_first_row_leave_no_file(batch, fake_engine):
    batch.write(prompts(3))
    before = sorted(os.listdir(batch.folder))

    def broken(requests):
        raise EngineError("the helper is gone")

    with pytest.raises(EngineError):
        batch.run(prepare_with=broken)
    assert sorted(os.listdir(batch.folder)) == before
    batch.journal.write_text("my notes\n")
    with pytest.raises(RunError, match="not a journal"):
        batch.run()
    assert sorted(os.listdir(batch.folder)) == [*before, batch.journal.name]
    batch.journal.unlink()
    batch.run(engine=fake_engine(fail=frozenset({"row-1"})))
    kept = {path: path.read_bytes() for path in (batch.out, batch.errors, batch.journal)}
    batch.write(prompts(5))
    with pytest.raises(EngineError):
        batch.run(prepare_with=broken)
    assert {path: path.read_bytes() for path in kept} == kept


def test_outputs_that_cannot_be(batch):
    batch.write(prompts(3))
    for path in (batch.folder, batch.folder / "no" / "such" / "out.jsonl"):
        batch.out = path
        with pytest.raises(RunError):
            batch.run()
    fifo = batch.folder / "fifo"
    os.mkfifo(fifo)
    packed = batch.folder / "out.jsonl.gz"
    for path, problem in ((fifo, "regular file"), (packed, "plain JSON lines"), ("-", "standard output")):
        batch.out = path
        before = sorted(os.listdir(batch.folder))
        with pytest.raises(RunError, match=problem):
            batch.run()
        assert sorted(os.listdir(batch.folder)) == before


def test_another_error_file_is_not_mixed_in(batch):
    batch.write(["bad", *prompts(2)])
    batch.run()
    with pytest.raises(RunError, match=r"out\.errors\.jsonl"):
        batch.run(errors=str(batch.folder / "elsewhere.jsonl"))
    batch.errors.unlink()
    batch.run(errors=str(batch.folder / "elsewhere.jsonl"))
    assert len((batch.folder / "elsewhere.jsonl").read_bytes().splitlines()) == 1


def test_ctrl_c_stops_within_a_second_with_finished_rows_written(batch, fake_engine):
    batch.write(prompts(2000))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        pressed = []

        def press(number=number, pressed=pressed):
            time.sleep(0.3)
            pressed.append(time.monotonic())
            os.kill(os.getpid(), number)

        threading.Thread(target=press).start()
        try:
            ran = batch.run(engine=fake_engine(delay=0.005))
            # The second one would end the process at once.
            assert all(signal.getsignal(each) == signal.SIG_DFL for each in handlers)
        finally:
            for each, handler in handlers.items():
                signal.signal(each, handler)
        assert time.monotonic() - pressed[0] < 5
        assert ran.outcome.stopped == number
        assert ran.outcome.progress.num_results > 5
        assert len(batch.answers()) == ran.outcome.results_before + ran.outcome.progress.num_results


def test_a_dead_engine_ends_the_run_and_no_row_is_blamed(batch, fake_engine):
    batch.write(prompts(500))
    engine = fake_engine(delay=0.001)
    threading.Timer(0.1, engine.close).start()
    with pytest.raises(EngineError):
        batch.run(engine=engine)
    assert batch.failures() == [] and 0 < len(batch.answers()) < 500
    batch.run()
    assert len(batch.answers()) == 500


def test_a_failing_helper_ends_the_run(batch):
    batch.write(prompts(100))

    def broken(requests):
        raise RunError("the helper is gone")

    with pytest.raises(RunError, match="helper is gone"):
        batch.run(prepare_with=broken)


def test_strict_stops_at_the_first_failed_row(batch, fake_engine):
    batch.write([*prompts(20), "bad", *prompts(2000, first=20)])
    ran = batch.run(engine=fake_engine(delay=0.001), strict=True, retry=True)
    assert ran.outcome.stopped == "strict"
    assert [row["error"]["code"] for row in batch.failures()] == ["invalid_json"]
    ran = batch.run(engine=fake_engine(delay=0.001), strict=True, retry=True)
    assert ran.outcome.stopped == "strict" and len(batch.failures()) == 1


@pytest.mark.parametrize("in_order", [False, True])
def test_strict_writes_one_failed_row_however_many_fail_at_once(batch, in_order):
    batch.write([*["bad"] * 50, *prompts(3)])
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    outcome = batch.run(strict=True, retry=True, in_order=in_order).outcome
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert outcome.stopped == "strict" and outcome.progress.num_errors == 1 == len(batch.failures())
    (failure,) = outcome.failures
    assert (failure.line, failure.custom_id, failure.error.code) == (1, "line-1", "invalid_json")


@pytest.mark.parametrize("as_pipe", [False, True])
def test_a_stopped_run_knows_whether_all_of_the_input_was_read(batch, as_pipe):
    """Read to its end, stopped afterwards; and for a pipe, that nobody writes to any more but somebody still could."""
    threads, source = set(threading.enumerate()), batch.input
    rows = prompts(12)
    if as_pipe:
        source = batch.folder / "fifo"
        os.mkfifo(source)
        pipe = os.open(source, os.O_RDWR)
        os.write(pipe, "".join(json.dumps(row) + "\n" for row in rows).encode())
    else:
        batch.write(rows)

    def prepare_late(requests):
        deadline = time.monotonic() + 60
        while not as_pipe and any(t.name == "coremill-read" for t in set(threading.enumerate()) - threads):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        no = RequestError("template_error", "the template says no", "messages")
        return [no if request.custom_id == "row-11" else (1, 2, 3) for request in requests]

    outcome = batch.run(strict=True, retry=True, input=source, format="jsonl", prepare_with=prepare_late).outcome
    assert outcome.stopped == "strict" and outcome.progress.input_ended is not as_pipe
    text = "\n".join(summary_lines(outcome, "OUT", "ERRORS", 1))
    assert ("not all of the input was read" in text) is as_pipe
    assert "ERRORS has 1 failed row (the same command runs it again)" in text
    if as_pipe:
        os.close(pipe)


def test_strict_in_input_order_stops_just_there(batch):
    batch.write([*prompts(20), "bad", *prompts(200, first=20)])
    batch.run(strict=True, retry=True, in_order=True)
    assert list(batch.answers())[:20] == [f"row-{i}" for i in range(20)]
