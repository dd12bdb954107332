"""What `coremill top` shows of two recorded snapshots, line by line."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from coremill.config.smaps import Memory
from coremill.coordinator.view.ceiling import Ceiling, load_ceiling, save_ceiling
from coremill.coordinator.view.machine import Facts
from coremill.coordinator.view.rates import History, view_of
from coremill.coordinator.view.screen import whole_lines
from coremill.coordinator.view.table import SORT_NAMES, plain, worker_lines
from coremill.tools.top.feed import Watcher
from coremill.tools.top.picture import picture

RECORDED = Path(__file__).parent / "recorded_glances.json"
FACTS = Facts(
    {0: 2600.4, 1: 3412.0},
    {0: 0.0, 1: 0.037},
    {
        4250: Memory(200 << 20, 150 << 20, 46 << 20, 88 << 20, 16 << 20),
        4251: Memory(190 << 20, 143 << 20, 46 << 20, 80 << 20, 17 << 20),
    },
)  # fmt: skip
CEILING = Ceiling(read_one=9e9, read_all=12e9, num_cores=2, measured=0.0)

AT_80 = """\
coremill run   SmolLM2-135M-Instruct.Q4_1   prompts.jsonl > results.jsonl
129 of about 3,990 rows (3%)   0 failed   10.9 rows/s   about 6 min 47 s left
tokens/s 123 prompt + 125 new   1.5 of 12.0 GB/s   prefix hits 94%   PSS 293M

  #  cores    state  active  fill  prompt/s  new/s  busy  GB/s   PSS  restarts
  0      0  running   16/16   91%        29     63   96%   0.8  150M         0
  1      1  running   16/16   91%        94     62   94%   0.8  143M         1
all                   32/32   91%       123    125   95%   1.5  293M         1

row                                              worker   phase  prompt  new  of
label-00352                                           0  decode     250    7   8
evil [2J 数据 row with a name that is rather l…       1  decode     242    5   8
label-00021                                           0  decode     242    7   8
label-00062                                           1  decode     242    5   8
label-00027                                           0  decode     242    7   8
label-00064                                           1  decode     242    5   8
… 26 more
"""
AT_160 = """\
coremill run   SmolLM2-135M-Instruct.Q4_1   prompts.jsonl > results.jsonl   pid 4242   15 s
129 of about 3,990 rows (3%)   3,829 waiting   32 running   0 failed   10.9 rows/s   about 6 min 47 s left
tokens/s 123 prompt + 125 new   1.5 of 12.0 GB/s   arena 69 of 4,096 blocks, 84 cached   prefix hits 94%   PSS 293M

  #  cores    MHz  steal    state  active  fill  prompt/s  new/s  busy  GB/s  of max   PSS  weights  arena  own  blocks  hits  restarts
  0      0  2,600     0%  running   16/16   91%        29     63   96%   0.8     13%  150M      46M    88M  16M      39   94%         0
  1      1  3,412     4%  running   16/16   91%        94     62   94%   0.8     13%  143M      46M    80M  17M      35   95%         1
all         3,006     2%            32/32   91%       123    125   95%   1.5     13%  293M      92M   168M  33M      69   94%         1

row                                                                                            worker   phase  prompt  new  of
label-00352                                                                                         0  decode     250    7   8
evil [2J 数据 row with a name that is rather long, as names of rows can be, beyond any column       1  decode     242    5   8
label-00021                                                                                         0  decode     242    7   8
label-00062                                                                                         1  decode     242    5   8
label-00027                                                                                         0  decode     242    7   8
label-00064                                                                                         1  decode     242    5   8
… 26 more
"""  # noqa: E501


@pytest.fixture
def snapshots():
    return json.loads(RECORDED.read_text())


def seen(snapshots, facts=FACTS, ceiling=CEILING):
    return view_of(snapshots[0], snapshots[0], snapshots[-1], facts, ceiling)


@pytest.mark.parametrize(("width", "height", "page"), [(80, 22, AT_80), (160, 48, AT_160)])
def test_pages_of_a_recorded_run(snapshots, width, height, page):
    assert "\n".join(map(plain, whole_lines(seen(snapshots), width, height))) + "\n" == page


@pytest.mark.parametrize("width", [1, 10, 20, 39, 40, 64, 80, 100, 120, 160, 250])
def test_lines_fit_and_hold_nothing_that_a_terminal_obeys(snapshots, width):
    view = seen(snapshots)
    for height in (1, 5, 9, 12, 24, None):
        lines = whole_lines(view, width, height)
        assert height is None or len(lines) <= max(height, 1)
        for line in map(plain, lines):
            assert cell_len(line) <= width
            assert line.isprintable()


def test_the_least_important_columns_go_first(snapshots):
    view = seen(snapshots)
    shown = [plain(worker_lines(view, width)[0]).split() for width in range(8, 160)]
    for narrow, wide in pairwise(shown):
        assert set(narrow) - {"…"} <= set(wide) | {"of", "max"}
    assert shown[40] == ["#", "state", "active", "prompt/s", "new/s", "restarts"]
    quiet = copy.deepcopy(view)
    for worker in (*quiet["workers"], quiet["totals"]):
        worker["restarts"] = 0
    assert "restarts" not in plain(worker_lines(quiet, 80)[0]) and "PSS" in plain(worker_lines(quiet, 80)[0])


def test_workers_are_sorted_and_the_unknown_come_last(snapshots):
    for snapshot in snapshots:
        snapshot["workers"].append({**snapshot["workers"][0], "worker": 2, "pid": None, "state": "starting"})
    view = seen(snapshots)

    def order(sort, descending=False):
        lines = worker_lines(view, 160, sort=sort, descending=descending)
        return [int(plain(line).split()[0]) for line in lines[1:-1]]

    assert order("#") == [0, 1, 2] and order("#", True) == [2, 1, 0]
    assert order("PSS") == [1, 0, 2] and order("PSS", True) == [0, 1, 2]
    assert order("prompt/s", True)[0] == 1
    assert "prompt/s↓" in plain(worker_lines(view, 160, sort="prompt/s", descending=True)[0])
    for name in SORT_NAMES:
        assert sorted(order(name)) == [0, 1, 2]


def test_few_lines_show_some_workers_and_the_sum_of_all(snapshots):
    for snapshot in snapshots:
        one = snapshot["workers"][0]
        snapshot["workers"] = [{**one, "worker": index, "pid": 4250} for index in range(30)]
    view = seen(snapshots)
    lines = [plain(line) for line in whole_lines(view, 80, 22, first=5)]
    assert [line.split()[0] for line in lines[5:-1]] == [str(index) for index in range(5, 21)]
    assert lines[-1].startswith("all") and " 480/480 " in lines[-1] and len(lines) == 22


def test_figures_of_a_view(snapshots):
    view = seen(snapshots)
    assert json.loads(json.dumps(view)) == view
    (first, second), sums = view["workers"], view["totals"]
    then, now = (snapshot["workers"][0] for snapshot in snapshots)
    span = snapshots[1]["time"] - snapshots[0]["time"]
    gained = {name: now[name] - then[name] for name in ("steps", "kv_positions", "step_sequences", "decode_tokens")}
    num_bytes = gained["steps"] * snapshots[0]["weight_bytes"] + gained["kv_positions"] * 23040
    assert first["gb_per_s"] == pytest.approx(num_bytes / span / 1e9, abs=1e-3)
    assert first["batch_fill"] == pytest.approx(gained["step_sequences"] / gained["steps"] / 16, abs=1e-4)
    assert first["decode_tokens_per_s"] == pytest.approx(gained["decode_tokens"] / span, abs=0.1)
    assert (first["ceiling_gb_per_s"], sums["ceiling_gb_per_s"]) == (6.0, 12.0)
    assert sums["decode_tokens"] == first["decode_tokens"] + second["decode_tokens"]
    assert first["pss_bytes"] == first["pss_weights_bytes"] + first["pss_arena_bytes"] + first["pss_private_bytes"]
    queue = view["queue"]
    assert queue["waiting"] + queue["running"] + queue["done"] + queue["errors"] + queue["skipped"] == queue["rows"]
    assert queue["rows_per_s"] == pytest.approx((129 - 96) / span, abs=1e-3)


def test_what_is_not_known_is_said_or_left_out(snapshots):
    del snapshots[0]["rows"], snapshots[1]["rows"]  # `up` and `serve` have no file
    view = seen(snapshots, Facts(), None)
    page = "\n".join(map(plain, whole_lines(view, 160)))
    assert "1.5 GB/s (ceiling unmeasured)" in page and "of max" not in page and "MHz" not in page
    assert view["queue"]["rows"] is None and view["queue"]["done"] == 129
    assert "129 rows done   224 waiting" in page
    snapshots[1]["kept"] = {"waiting": 1000, "begun": 3, "done": 2}  # of a queue
    assert "129 rows done   1,224 waiting" in "\n".join(map(plain, whole_lines(seen(snapshots), 160)))
    first = view_of(snapshots[0], snapshots[0], snapshots[0], Facts(), None)  # a first look
    assert first["workers"][0]["decode_tokens_per_s"] is None and first["queue"]["rows_per_s"] is None
    assert "tokens/s - prompt + - new" in "\n".join(map(plain, whole_lines(first, 160)))


def test_states(snapshots):
    now = snapshots[-1]
    for worker, state in zip(now["workers"], ("draining", "ready"), strict=True):
        worker.update(state=state, active=0, rows=[])
    now["queue"]["running"] = 0
    assert [worker["state"] for worker in seen(snapshots)["workers"]] == ["leaving", "idle"]
    now["paused"] = True
    view = seen(snapshots)
    assert [worker["state"] for worker in view["workers"]] == ["leaving", "paused"]
    page = "\n".join(map(plain, whole_lines(view, 80)))
    assert "PAUSED" in page and "left" not in page and "worker" not in page
    now["workers"][0]["state"] = "stopped"
    assert seen(snapshots)["totals"]["ceiling_gb_per_s"] == 9.0  # one core reads no more


def test_rates_are_means_of_the_last_seconds(snapshots):
    history = History()
    for second in range(40):
        snapshot = copy.deepcopy(snapshots[0])
        snapshot["time"] += second
        snapshot["workers"][0]["decode_tokens"] += 100 * second if second < 20 else 2000
        snapshot["rows"]["results"] += second if second < 30 else 30
        history.add(snapshot)
        view = history.view()
        if second == 10:
            assert view["workers"][0]["decode_tokens_per_s"] == 100 and view["queue"]["rows_per_s"] == 1
    assert view["workers"][0]["decode_tokens_per_s"] == 0
    assert 0 < view["queue"]["rows_per_s"] < 1


def test_a_step_that_takes_longer_than_the_window_still_has_a_rate(snapshots):
    first, last = snapshots
    between = copy.deepcopy(last)
    between["time"] = last["time"] - 1.0
    before = copy.deepcopy(first)
    view = view_of(between, before, last, Facts(), None)
    assert view["workers"][0]["decode_tokens_per_s"] == seen(snapshots)["workers"][0]["decode_tokens_per_s"] > 0
    last["workers"][0]["active"] = 0  # it only waits
    assert view_of(between, before, last, Facts(), None)["workers"][0]["decode_tokens_per_s"] == 0


def test_ceilings_of_fewer_and_more_cores():
    assert [CEILING.of_cores(count) for count in (1, 2, 4)] == [9e9, 12e9, 24e9]


def test_a_ceiling_is_remembered_for_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("COREMILL_CACHE", str(tmp_path))
    assert load_ceiling() is None
    assert not save_ceiling(CEILING, disturbed=True) and load_ceiling() is None
    assert save_ceiling(CEILING, disturbed=False) and load_ceiling() == CEILING
    assert not save_ceiling(replace(CEILING, read_all=11e9), disturbed=True) and load_ceiling() == CEILING
    better = replace(CEILING, read_all=13e9)
    assert save_ceiling(better, disturbed=True) and load_ceiling() == better
    (file,) = (tmp_path / "machines").iterdir()
    for damaged in ("", "[]", "{", '{"read_one": 1}'):
        file.write_text(damaged)
        assert load_ceiling() is None
    tmp_path.joinpath("machines", file.name).unlink()
    monkeypatch.setenv("COREMILL_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    assert not save_ceiling(CEILING, disturbed=False)


def test_picture(snapshots):
    from xml.etree import ElementTree

    svg = picture(whole_lines(seen(snapshots), 120), 120)
    text = "".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ")
    for part in ("coremill top", "label-00352", "running", "GB/s", "evil [2J"):
        assert part in text
    assert "font-face" not in svg and "url(http" not in svg and svg.startswith("<svg ")


# ---- what looks ----


def test_whatever_a_look_raises_is_told_in_one_line_and_the_next_look_comes():
    errors = iter([KeyError("sort"), PermissionError(13, "no\nentry\x1b[2J"), TimeoutError()])

    def look(rows: int) -> None:
        for error in errors:
            raise error

    feed = SimpleNamespace(interval=3600, look=look, history=SimpleNamespace(view=lambda: {"a": "view"}))
    looked: SimpleQueue[None] = SimpleQueue()
    watcher = Watcher(feed, lambda: looked.put(None))
    told = []
    for _ in range(4):
        looked.get(timeout=60)
        told.append((watcher.problem, watcher.view))
        watcher.hurry()
    watcher.close()
    assert told[0] == ("KeyError: 'sort'", None)
    assert told[1] == ("PermissionError: [Errno 13] no entry[2J", None)
    assert "no answer for" in told[2][0] and told[3] == (None, {"a": "view"})
