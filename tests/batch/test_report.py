"""What people are told: numbers that add up, and nothing a terminal would obey."""

import json
import signal
from dataclasses import replace

import pytest

from coremill.config.errors import RequestError
from coremill.config.printable import printable, shortened
from coremill.coordinator.batch import slowly
from coremill.coordinator.batch.estimate import Count, seconds_left
from coremill.coordinator.batch.plan import Plan, Setting, estimate_seconds, format_seconds, plan_lines, shared_tokens
from coremill.coordinator.batch.report import (
    JsonReporter,
    PlainReporter,
    progress_line,
    share_done,
    worker_states,
    worker_table,
)
from coremill.coordinator.batch.results import find_rows
from coremill.coordinator.batch.runner import Failure, Outcome, Progress
from coremill.coordinator.batch.shownrows import result_lines
from coremill.coordinator.batch.summary import exit_code, rows_rate, stats_object, summary_lines
from coremill.coordinator.text.process import Death
from coremill.coordinator.view.machine import Facts
from coremill.coordinator.view.rates import view_of

WORKER = {
    "worker": 0, "pid": 7, "cores": [0, 2], "state": "ready", "active": 3, "prefill_tokens": 1000, "decode_tokens": 500,
    "busy_seconds": 5.0, "mean_batch": 2.5, "pss_bytes": 3 << 20, "pss_private_bytes": None, "restarts": 1,
}  # fmt: skip


def plan(**changes):
    figures = {
        "num_read": 10, "whole": True, "num_rows": 8, "num_unfit": 2, "prompt_tokens": 800, "max_new_tokens": 80,
        "shared_tokens": 300,
    }  # fmt: skip
    return Plan(**{**figures, **changes})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mb\x1b]0;title\x07c", "a[31mb]0;titlec"),
        ("a\nb\r\n\tc", "a b c"),
        ("\x9b2Ja\x7f\x00", "2Ja"),
        ("abc\u202edef\u2066", "abcdef"),
        ("naïve 数据 👩‍🔬", "naïve 数据 👩‍🔬"),
        ("half \ud83d", "half "),
    ],
)
def test_control_characters_are_stripped(text, shown):
    assert printable(text) == shown


def test_shortened():
    assert shortened("  a  b ", 10) == "a b"
    assert shortened("x" * 10**7, 5) == "xxxx…"
    assert len(shortened("word " * 1000, 40)) <= 40


def test_results_shown_are_safe(batch):
    batch.write([{"custom_id": "evil \x1b[2J", "prompt": "x"}])
    batch.run()
    (row,) = batch.run(keep=5).outcome.first
    found = find_rows([str(batch.out), str(batch.errors)], [row.key])
    found[row.key]["response"]["body"]["choices"][0]["text"] = "\x1b]52;c;x\x07 hello"
    _, line = result_lines([row], found, 60)
    assert "\x1b" not in line and "\x07" not in line and "hello" in line and "length" in line


def test_results_shown_are_the_first_rows_of_the_input(batch, fake_engine):
    batch.write([{"custom_id": "long", "prompt": "a " * 30 + "end of it"}, "bad", {"prompt": [1, 2]}, {"prompt": "x"}])
    first = batch.run(engine=fake_engine(slots=4), keep=3).outcome.first
    assert [row.custom_id for row in first] == ["long", "line-2", "line-3"]
    assert batch.run(keep=3).outcome.first == first
    found = find_rows([str(batch.out), str(batch.errors), "missing"], [row.key for row in first[:2]])
    lines = result_lines(first, found, 80)
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    assert "end of it" in text and "…" in text and "invalid_json" in text and "2 token ids" in text
    assert [line.split()[1] for line in lines if line.startswith(("long", "line-"))] == ["length", "failed", "-"]
    styled = result_lines(first, found, 80, lambda kind, text: f"<{kind}>")
    assert {"<head>", "<id>", "<length>", "<failed>", "<answer>"} <= set(" ".join(styled).replace("<", " <").split())


def test_shared_tokens_is_what_a_prefix_tree_saves():
    prompts = [(1, 2, 3), (1, 2, 4), (1, 2, 3), (5,), (1,), ()]
    nodes = {prompt[:length] for prompt in prompts for length in range(1, len(prompt) + 1)}
    assert shared_tokens(prompts) == sum(map(len, prompts)) - len(nodes) == 6
    assert shared_tokens([]) == 0


def test_plan_lines():
    why = "one physical core, NUMA node 0"
    setting = Setting(groups=(((0,), why), ((1,), why)), memory=(("weights", 1 << 20),), ctx=64)
    assert f"workers: 1 on cores 0 ({why})" in plan_lines(plan(), replace(setting, groups=(((0,), why),)), 10, 0, "")
    text = "\n".join(plan_lines(plan(), setting, 10, 0, "JSON lines"))
    for part in (
        "10 rows",
        "800 in prompts",
        "at most 80",
        "300 prompt tokens",
        "2 rows too long for --ctx 64",
        "weights 1 MiB",
        "2 on cores 0, 1 (one physical core each, NUMA node 0)",
    ):
        assert part in text
    assert "about" not in text
    text = "\n".join(plan_lines(plan(num_unfit=0), setting, 10, 0, "JSON lines"))
    assert "warning" not in text and "KV" not in text
    assert "300 prompt tokens (38%) repeat another row's beginning and are computed once" in text
    alone = replace(setting, sharing=False, multiplies=1, rate=1.0)
    assert "computed again (--no-prefix-cache)" in "\n".join(plan_lines(plan(), alone, 10, 0, ""))
    shared = estimate_seconds(plan(), replace(alone, sharing=True), plan().num_rows)
    assert estimate_seconds(plan(), alone, plan().num_rows) - shared == pytest.approx(300)
    small = replace(setting, arena=1 << 20, kv_block=(32, 1 << 14))
    text = "\n".join(plan_lines(plan(num_unfit_arena=1, num_unlimited=2), small, 10, 0, "JSON lines"))
    assert "1 row too long for --arena 1 MiB" in text and "2 chats without max_tokens" in text
    assert f"at most {(8 + 880 // 32) * 16} KiB" in text
    text = "\n".join(plan_lines(plan(whole=False), setting, 5000, 4, "JSON lines"))
    assert "about 5,000 rows" in text and "4 of those read so far are finished" in text and "over the first 10" in text
    assert "unknown number" in plan_lines(plan(whole=False), setting, None, 0, "text")[0]


def test_plan_says_that_lines_are_continued_and_not_answered():
    hints = [
        line for c in (True, False) for line in plan_lines(plan(), Setting(continued=c), 10, 0, "") if "--chat" in line
    ]
    assert len(hints) == 1 and hints[0].startswith("hint: each line is a text that the model continues")


def test_estimate_scales_with_rows_and_is_silent_without_figures():
    setting = Setting(multiplies=10**6, rate=1e9)
    assert estimate_seconds(plan(), setting, 80) == pytest.approx(10 * estimate_seconds(plan(), setting, 8))
    assert estimate_seconds(plan(), Setting(), 8) is None
    assert estimate_seconds(plan(num_rows=0), setting, 8) is None


def test_share_done_is_by_time_or_rows():
    progress = Progress(num_read=8, num_results=2, num_rows=8, seconds=10)
    assert share_done(progress, None) == 0.25
    assert share_done(progress, 30.0) == 0.25
    assert share_done(progress, 10.0) == 0.5
    assert share_done(Progress(num_read=8, num_results=2), 10.0) is None
    assert share_done(Progress(num_read=4, num_skipped=4, num_rows=4), None) == 1.0


def count(**changes):
    figures = {
        "seconds": 10.0, "num_left": 90, "num_active": 10, "num_finished": 10, "prefill_tokens": 2000,
        "decode_tokens": 150, "finished_tokens": 100, "decode_rate": 15.0,
    }  # fmt: skip
    return Count(**{**figures, **changes})


def test_time_left_of_equal_rows():
    """Rows of 100 prompt tokens and 10 new ones, half of the tokens of those running done."""
    left = seconds_left(count(), plan(num_rows=8, max_new_tokens=80))
    exact = (80 * 125 + 10 * 12.5) * 10 / (2000 + 2.5 * 150)
    assert left == pytest.approx(exact, rel=0.05)


def test_time_left_when_only_a_long_tail_is_left():
    """27 of 30 chats without max_tokens ended after 50 tokens; three do not end."""
    unlimited = plan(num_rows=30, max_new_tokens=30 * 4000)
    last = {"num_left": 3, "num_active": 3, "num_finished": 27, "finished_tokens": 27 * 50, "decode_rate": 60.0}
    left = [
        seconds_left(count(seconds=s, decode_tokens=27 * 50 + 3 * n, **last), unlimited)
        for s, n in ((4, 200), (20, 600), (70, 3900))
    ]
    assert left[0] >= 10 and left[1] >= 30 and left[2] <= 15


def test_nothing_is_said_of_the_time_left_too_early():
    assert seconds_left(count(seconds=0.5), plan()) is None
    assert seconds_left(count(num_active=0, num_finished=0), plan()) is None
    assert seconds_left(count(), None) is None
    assert seconds_left(count(num_left=0), None) == 0.0


def view(prompt=0.0, new=0.0, left=None, paused=False, workers=()):
    """As much of a view (coordinator/view/rates.py) as a line of progress needs."""
    sums = {"prefill_tokens_per_s": prompt, "decode_tokens_per_s": new}
    return {"totals": sums, "queue": {"seconds_left": left}, "paused": paused, "workers": list(workers)}


def test_progress_line():
    progress = Progress(num_read=8, num_results=2, num_errors=1, num_rows=8, input_ended=True, seconds=10)
    assert progress_line(progress, view(100.0, 50.4, 10.0)) == (
        "3 of 8 rows, 1 failed; 100 prompt + 50 new tokens/s; 50% of the time, about 10 s left"
    )
    assert progress_line(progress, view(100.0, 50.4, 10.0, paused=True)) == "3 of 8 rows, 1 failed; paused"
    assert progress_line(Progress(num_results=5), view()) == "5 rows; 0 prompt + 0 new tokens/s"
    shared = Progress(num_results=5, prompt_tokens=200, cached_tokens=174)
    assert progress_line(shared, view()) == "5 rows; 0 prompt + 0 new tokens/s, 87% of prompts cached"


BIG_WORKER = {
    **WORKER, "worker": 1234, "cores": list(range(96)), "prefill_tokens": 123456789, "decode_tokens": 12345678,
    "mean_batch": 64.0, "pss_bytes": 12345 << 20, "pss_private_bytes": 1234 << 20, "state": "starting",
}  # fmt: skip


def test_worker_table_lines_up():
    lines = worker_table([WORKER, {**WORKER, "worker": 11, "pss_bytes": None}], 10.0, 80)
    assert len({len(line) for line in lines[:3]}) == 1 and lines[0].endswith("restarts")
    assert "0,2" in lines[1] and "150" in lines[1] and "50%" in lines[1] and "3 MiB" in lines[1]
    assert "at once: rows in a step" in lines[3]
    assert "restarts" not in "\n".join(worker_table([{**WORKER, "restarts": 0}], 10.0, 80))


def test_tables_fit_a_terminal():
    for width in (40, 80):
        lines = worker_table([{**BIG_WORKER, "restarts": 0}], 10.0, width)
        assert all(len(line) <= width for line in lines)
    assert not any("…" in line for line in lines)


def test_worker_states():
    at_work = [{"worker": 0, "state": "running", "active": 3}, {"worker": 1, "state": "idle", "active": 0}]
    starting = {"worker": 4, "state": "starting", "active": 0}
    assert worker_states([*at_work, starting]) == "active 3+0, worker 4 starting"
    assert worker_states(at_work[:1] * 20) == "active 60 on 20 workers"
    assert worker_states([]) == "active 0"


def test_seconds_for_people():
    assert [format_seconds(s) for s in (0.04, 9.96, 12.4, 61, 3599.7, 7300)] == [
        "0.0 s", "10.0 s", "12 s", "1 min 1 s", "1 h 0 min", "2 h 1 min",
    ]  # fmt: skip


def outcome(**changes):
    progress = Progress(
        num_read=20, num_skipped=5, num_results=12, num_errors=3, num_rows=20, input_ended=True, seconds=2
    )
    progress.prompt_tokens, progress.completion_tokens = 100, 50
    return Outcome(progress, **{"results_before": 4, "errors_before": 1, "error_codes": {"invalid_json": 3}, **changes})


def test_exit_codes():
    assert exit_code(outcome()) == 3
    clean = Outcome(Progress(num_read=2, num_results=2))
    assert exit_code(clean) == 0
    clean.num_changed = 1
    assert exit_code(clean) == 5
    clean.stopped = "strict"
    assert exit_code(clean) == 6
    clean.stopped = signal.SIGINT
    assert exit_code(clean) == 130
    assert exit_code(outcome(stopped=signal.SIGTERM)) == 143


def test_summary_adds_up():
    text = "\n".join(summary_lines(outcome(), "o.jsonl", "e.jsonl", 0.5))
    assert "20 read = 5 finished by earlier runs + 12 results + 3 failed" in text
    assert "3 invalid_json" in text and "o.jsonl has 16 results" in text and "e.jsonl has 4 failed rows" in text
    assert "150; 75 tokens/s" in text
    stopped = outcome(stopped=signal.SIGINT)
    stopped.progress.num_results, stopped.progress.input_ended = 2, False
    text = "\n".join(summary_lines(stopped, "o", "e", 0.5))
    assert "2 results + 3 failed + 10 not finished" in text and "not all of the input was read" in text


def test_warnings_name_rows_safely():
    text = "\n".join(
        summary_lines(
            outcome(num_changed=30, changed=[(7, "row \x1b[2J")], num_gone=2, num_dropped_errors=1, num_unrecorded=4),
            "o",
            "e",
            1,
        )
    )
    assert (
        "30 rows of the input changed" in text
        and "once their lines are removed from o" in text
        and "line 7 ('row [2J')" in text
    )
    assert "2 rows finished by earlier runs" in text and "1 row that failed" in text and "of 4 finished rows" in text


def test_slow_rows_have_a_rate_too():
    rates = [rows_rate(num, seconds) for num, seconds in ((5000, 2), (10, 10), (9, 10), (1, 60), (1, 61), (1, 40_000))]
    assert rates == ["2,500.0 rows/s", "1.0 rows/s", "54.0 rows/min", "1.0 rows/min", "59.0 rows/h", "0.1 rows/h"]


def test_summary_of_failures_names_the_first():
    failures = [Failure(3, "a\x1b", RequestError("invalid_json", "not valid JSON"))]
    text = "\n".join(summary_lines(outcome(failures=failures), "o", "e", 1))
    assert "line 3 ('a'): not valid JSON" in text and "and 2 more" in text
    failed = Outcome(Progress(num_read=5, num_errors=5, input_ended=True, seconds=1), error_codes={"x": 5})
    text = "\n".join(summary_lines(failed, "o", "e", 1))
    assert "rows/s" not in text and "all rows of this run failed" in text


def test_summary_of_a_stopped_run_says_what_was_discarded():
    stopped = outcome(stopped=signal.SIGINT)
    stopped.progress.num_results = 2
    assert "350 more of unfinished rows were discarded" in "\n".join(summary_lines(stopped, "o", "e", 1, 500))


def test_summary_of_a_run_with_nothing_to_do():
    idle = Outcome(Progress(num_read=30, num_skipped=30), results_before=30, idle=True)
    lines = summary_lines(idle, "o", "e", 1)
    assert lines == ["nothing to do: all 30 rows of the input are finished", "o has 30 results"]
    assert exit_code(idle) == 0
    assert exit_code(Outcome(Progress(num_read=3), results_before=2, num_gone=2)) == 5


def test_statistics_have_the_names_scripts_rely_on():
    stats = stats_object(outcome(), {"workers": [WORKER], "queue": {}, "startup_seconds": 9}, 0.5)
    assert json.loads(json.dumps(stats)) == stats
    assert {
        "rows",
        "errors",
        "seconds",
        "startup_seconds",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
    } < set(stats)
    assert (stats["rows"], stats["errors"], stats["startup_seconds"], stats["workers"]) == (20, 4, 0.5, [WORKER])


class FakeWatch:
    """A run's figures that do not change."""

    plan = None

    def __init__(self):
        figures = dict.fromkeys(
            ("steps", "step_rows", "step_sequences", "prefill_tokens", "decode_tokens", "kv_positions", "busy_seconds",
             "blocks", "prompt_tokens", "cached_tokens", "restarts"), 0
        )  # fmt: skip
        worker = {"worker": 0, "pid": 7, "cores": [0, 2], "state": "ready", "active": 3, "rows": [], **figures}
        queue = {"waiting": 3, "running": 3, "finished": 2, "failed": 0}
        arena = {"blocks": 9, "block_bytes": 1, "free_blocks": 4, "cached_blocks": 2}
        self.snapshot = {
            "time": 0.0, "paused": False, "max_active": 4, "step_tokens": 8, "pack": "", "weight_bytes": 1,
            "kv_position_bytes": 1, "queue": queue, "arena": arena, "workers": [worker],
        }  # fmt: skip

    def look(self, progress):
        return True

    def view(self):
        return view_of(self.snapshot, self.snapshot, {**self.snapshot, "time": 1.0}, Facts(), None)


def report_all(reporter):
    reporter.attach(Setting(ctx=64), "JSON lines", FakeWatch())
    reporter.plan(plan(), 10, 0)
    for second in (0.0, 1.0, 4.9, 6.2, 7.0, 11.3, 31.0):
        reporter.progress(Progress(num_read=8, num_results=2, num_rows=8, seconds=second))
    reporter.worker_event({"event": "worker_died", "worker": 0, "pid": 7, "cause": "killed by SIGKILL"})
    reporter.worker_event({"event": "worker_ready", "worker": 0, "pid": 8})
    reporter.helper_died(Death("outside", "was ended by SIGKILL"))
    for done in range(0, 101):
        reporter.stage("packing", done, 100)
    reporter.summary(["worker  cores"], ["rows: 8"], {"rows": 8}, 3)
    reporter.close()


def test_plain_reporter(capsys):
    report_all(PlainReporter())
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if not line.startswith("coremill: ")] == ["worker  cores"]
    assert sum("tokens/s" in line for line in lines) == 3
    assert sum("restarts" in line for line in lines) == 1, "a table of workers every half minute"
    assert sum("killed by SIGKILL" in line for line in lines) == 1
    assert sum("packing" in line for line in lines) == 5
    assert sum("its rows go on" in line for line in lines) == 2
    assert sum("the text helper died: it was ended by SIGKILL" in line for line in lines) == 1


def test_log_of_json_lines(capsys):
    report_all(JsonReporter())
    entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert all(entry["time"] > 0 for entry in entries)
    kinds = [entry["event"] for entry in entries]
    assert kinds == ["plan", *["progress"] * 3, "worker_died", "worker_ready", "helper_died", *["stage"] * 5, "summary"]
    assert entries[0]["plan"]["prompt_tokens"] == 800 and entries[1]["workers"][0]["cores"] == [0, 2]
    assert entries[4]["cause"] == "killed by SIGKILL" and entries[4]["pid"] == 7
    assert entries[6]["cause"] == "it was ended by SIGKILL"
    assert [entry["done"] for entry in entries[7:12]] == [0, 25, 50, 75, 100]
    assert entries[-1]["exit_code"] == 3 and entries[-1]["stats"] == {"rows": 8}


def test_progress_is_told_of_what_takes_longer_than_a_second(monkeypatch):
    now, told = [100.0], []
    monkeypatch.setattr(slowly.time, "monotonic", lambda: now[0])
    progress = slowly.Slowly("reading", lambda *what: told.append(what))
    for done in range(1, 6 * 1024 + 1):
        now[0] += 0.3 / 1024
        progress(done, 9000)
    assert [(stage, done // 1024, total) for stage, done, total in told] == [("reading", n, 9000) for n in (4, 5, 6)]
    unheard = slowly.Slowly("unheard", None)
    now[0] += 100
    for done in range(5000):
        unheard(done, 1)
    assert len(told) == 3
