"""map(): any input, a window of it at a time, hooks, and what goes wrong in the caller's own functions."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import threading
import time
from concurrent.futures import CancelledError

import pytest

from coremill.config.errors import ConfigError, EngineClosedError, RequestError
from coremill.coordinator import Coordinator, Failure, Reject, Result, Retry


@pytest.fixture(scope="module")
def shared(tiny_pack):
    with Coordinator(tiny_pack, ctx=400) as coordinator:
        yield coordinator
        assert coordinator.drain(60)  # whatever the tests did


@pytest.fixture(autouse=True)
def still_usable(shared):
    yield
    assert shared.submit(prompt_ids=[5], max_tokens=1).result(60)


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.002)


class Counted:
    """An input that counts what is taken from it; endless unless told otherwise."""

    def __init__(self, rows=None) -> None:
        self.rows = itertools.count() if rows is None else iter(rows)
        self.taken = 0

    def __iter__(self):
        for number in self.rows:
            self.taken += 1
            yield number if isinstance(number, (str, dict)) else {"prompt": [5 + number % 40, 7]}


@pytest.mark.parametrize("ordered", [True, False])
def test_ten_thousand_tiny_jobs_in_a_small_window(shared, ordered):
    rows, window = Counted(range(10_000)), 50
    indices, most = [], 0
    for given, result in enumerate(shared.map(rows, ordered=ordered, window=window, max_tokens=1)):
        most = max(most, rows.taken - given)
        indices.append(result.index)
        assert shared._roster.num_unfinished <= window
    assert most <= window
    assert sorted(indices) == [*range(10_000)]
    assert indices == sorted(indices) or not ordered


def test_nothing_is_taken_in_while_nobody_takes_out(shared):
    rows = Counted()
    results = shared.map(rows, window=20, max_tokens=1)
    next(results)
    wait_until(lambda: rows.taken == 21 and shared._roster.num_unfinished == 0)
    for _ in range(3):
        next(results)
    wait_until(lambda: rows.taken == 24)
    results.close()
    assert list(results) == []


def test_results_come_while_the_input_is_slow(shared):
    more = threading.Event()

    def rows():
        yield "a"
        assert more.wait(60)  # for the result of the first
        yield "b"

    results = shared.map(rows(), max_tokens=1)
    assert next(results).row == "a"
    more.set()
    assert [result.row for result in results] == ["b"]


def test_results_are_those_of_the_batch_runner(shared, tiny_pack, tmp_path):
    from coremill.config.engine import EngineConfig
    from coremill.config.request import SamplingParams
    from coremill.coordinator.batch.job import BatchOptions, run_batch
    from coremill.coordinator.batch.report import PlainReporter

    rows = [
        {"prompt": "a b c", "max_tokens": 9},
        {"messages": [{"role": "user", "content": "hello"}], "temperature": 0.5, "stop": ["x"]},
        {"custom_id": "mine", "prompt": [5, 6, 7], "seed": 3, "metadata": {"a": "b"}},
        {
            "custom_id": "openai",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "d", "model": "default"},
        },
        {"prompt": "e", "model": "other"},
        {"prompt": "f", "max_tokens": 0},
        {"prompt": "g", "colour": 1},
        {"prompt": "xq" * 400},
        {"neither": 1},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_batch(
        BatchOptions(
            str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), str(tiny_pack), EngineConfig(ctx=400),
            SamplingParams(max_tokens=20),
        ),
        PlainReporter(),
        time.monotonic,
    )  # fmt: skip
    files = (tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl")
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    of_run = {line["custom_id"]: line for line in lines}
    seen = []
    for outcome in shared.map(rows, errors="return", max_tokens=20):
        line = of_run[outcome.custom_id]
        if isinstance(outcome, Failure):
            seen.append((outcome.error.code, outcome.error.param))
            assert seen[-1] == (line["error"]["code"], line["error"]["param"])
            continue
        choice, usage = line["response"]["body"]["choices"][0], line["response"]["body"]["usage"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert (outcome.text, outcome.finish_reason) == (text, choice["finish_reason"])
        assert outcome.usage.completion_tokens == usage["completion_tokens"]
        assert outcome.row is rows[outcome.index]
    codes = ("model_not_found", "invalid_value", "unknown_parameter", "context_length_exceeded")
    assert [code for code, _ in seen] == [*codes, "missing_required_parameter"]


def test_texts_as_messages(shared):
    as_rows = [{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": text}]} for text in "ab"]
    expected = [result.text for result in shared.map(as_rows, max_tokens=8)]
    assert [result.text for result in shared.map(["a", "b"], max_tokens=8, system="S")] == expected


def test_options_of_rows_and_of_all(shared):
    rows = ["a", {"prompt": "a", "max_tokens": 3, "timeout": 3600, "retries": 1}, {"prompt": "a", "priority": "high"}]
    first, second, third = shared.map(rows, errors="return", max_tokens=2, priority=1)
    assert (first.usage.completion_tokens, second.usage.completion_tokens) == (2, 3)
    assert third.error.param == "priority" and third.row is rows[2]
    with pytest.raises(RequestError, match="deadline"):
        next(shared.map(["a"], max_tokens=300, deadline=1.0))


# ---- hooks ----


def test_a_hook_makes_values_rejects_and_asks_again(shared):
    tries: dict[int, list[str]] = {}

    def hook(result: Result) -> int:
        tries.setdefault(result.index, []).append(result.text)
        if result.index == 1:
            raise Reject("not this one")
        if result.index == 2 and len(tries[2]) < 3:
            raise Retry("once more")
        if result.index == 3:
            raise Retry("never good enough", max_tokens=4)
        return len(result.text)

    outcomes = list(shared.map(["a"] * 5, max_tokens=12, hook=hook, errors="return", retries=2))
    values = [outcome.value for outcome in outcomes if isinstance(outcome, Result)]
    assert values == [len(tries[n][-1]) for n in (0, 2, 4)]
    assert [(f.index, f.error.code) for f in outcomes if isinstance(f, Failure)] == [(1, "rejected"), (3, "rejected")]
    assert "not this one" in str(outcomes[1].error) and "after 2 retries: never good" in str(outcomes[3].error)
    assert [len(tries[n]) for n in range(5)] == [1, 1, 3, 3, 1]
    assert len(set(tries[2])) == 3  # each time other random numbers,
    again = [outcome.text for outcome in shared.map(["a"] * 5, max_tokens=12, hook=None)]
    assert again[2] == tries[2][0]  # which are the same in every run
    tries.clear()
    assert list(shared.map(["a"] * 5, max_tokens=12, hook=hook, errors="return", retries=2))[2].text == outcomes[2].text


def test_what_a_hook_raises_reaches_the_caller_who_may_go_on(shared):
    def hook(result: Result) -> None:
        if result.index == 2:
            raise ZeroDivisionError("mine")

    results = shared.map(Counted(range(5)), max_tokens=1, hook=hook)
    assert [next(results).index, next(results).index] == [0, 1]
    with pytest.raises(ZeroDivisionError, match="mine"):
        next(results)
    assert [result.index for result in results] == [3, 4]


def test_a_wrong_retry_is_the_hooks_fault(shared):
    def hook(result: Result) -> None:
        raise Retry("again", colour="red")

    with pytest.raises(TypeError, match="'colour'"):
        list(shared.map(["a"], max_tokens=1, hook=hook))


# ---- what goes wrong ----


@pytest.mark.parametrize("error", [ValueError("the input"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("ordered", [True, False])
def test_what_the_input_raises_comes_after_the_rows_before_it(shared, error, ordered):
    def rows():
        yield from Counted(range(30))
        raise error

    seen = []
    with pytest.raises(type(error)):
        for result in shared.map(rows(), max_tokens=2, ordered=ordered):
            seen.append(result.index)
    assert sorted(seen) == [*range(30)]


def test_a_row_that_fails_is_raised_in_its_turn_and_the_others_go_on(shared):
    rows = ["a", {"prompt": "a", "temperature": 9}, "b", 17, "xq" * 400, "c"]
    results, seen = shared.map(rows, max_tokens=2), []
    while True:
        try:
            seen.append(next(results).row)
        except RequestError as error:
            seen.append(error.code)
        except StopIteration:
            break
    assert seen == ["a", "invalid_value", "b", "invalid_value", "context_length_exceeded", "c"]


@pytest.mark.parametrize("how", ["close", "with", "drop", "raise in the loop"])
def test_a_map_that_is_given_up_stops(shared, how):
    rows = Counted()
    results = shared.map(rows, max_tokens=300, window=40)
    first = next(results)
    assert first.index == 0
    if how == "close":
        results.close()
    elif how == "with":
        with results:
            pass
    elif how == "drop":
        del results
        gc.collect()
    else:
        with pytest.raises(ZeroDivisionError), results:
            for _ in results:
                raise ZeroDivisionError
    wait_until(lambda: shared._roster.num_unfinished == 0)
    taken = rows.taken
    assert shared.submit("a", max_tokens=3).result(60)
    assert rows.taken <= taken + 1 <= 45
    wait_until(lambda: not any(thread.name == "coremill-map" for thread in threading.enumerate()))


def test_cancelled_from_outside(shared):
    results = shared.map(Counted(), max_tokens=300, window=40)
    next(results)
    shared.cancel_all()
    with pytest.raises(CancelledError):
        list(results)


def test_closed_under_a_map(coordinator):
    short = coordinator(ctx=400, workers=1)
    results = short.map(Counted(), max_tokens=50, window=40)
    next(results)
    threading.Thread(target=short.close).start()
    with pytest.raises(EngineClosedError):
        list(results)


def test_several_maps_and_readers_at_once(shared):
    found: list[int] = []

    def read(results) -> None:
        found.extend(result.index for result in results)

    one = shared.map(Counted(range(300)), max_tokens=1, window=30)
    others = [shared.map(Counted(range(100)), max_tokens=1, window=30, ordered=False) for _ in range(3)]
    threads = [threading.Thread(target=read, args=(results,)) for results in [one, one, one, *others]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(found) == sorted([*range(300), *range(100), *range(100), *range(100)])


def test_a_queue_shorter_than_the_window(coordinator):
    short = coordinator(ctx=400, max_queue=3)
    assert [result.index for result in short.map(Counted(range(50)), max_tokens=1, window=30)] == [*range(50)]


def test_an_async_iterable(shared):
    async def rows():
        for number in range(20):
            await asyncio.sleep(0)
            yield f"row {number}"
        raise ValueError("the input")

    seen = []
    with pytest.raises(ValueError, match="the input"):
        for result in shared.map(rows(), max_tokens=2):
            seen.append(result.row)
    assert seen == [f"row {number}" for number in range(20)]


def test_an_async_iterable_that_is_given_up(shared):
    ended = threading.Event()

    async def rows():
        try:
            yield "a"
            await asyncio.sleep(3600)
            yield "b"
        finally:
            ended.set()

    results = shared.map(rows(), max_tokens=2)
    next(results)
    results.close()
    assert ended.wait(60)


def test_arguments_are_checked(shared):
    for rows in ("abc", b"abc", {"prompt": "a"}, 5, None):
        with pytest.raises(TypeError, match="rows is a"):
            shared.map(rows)
    for wrong in ({"window": 0}, {"window": 1.5}, {"errors": "ignore"}):
        with pytest.raises(ConfigError):
            shared.map(["a"], **wrong)
    with pytest.raises(TypeError, match="'colour'"):
        shared.map(["a"], colour="red")
    for wrong in ({"temperature": 9}, {"timeout": 0}, {"retries": -1}, {"chat": 1}, {"system": 5}):
        with pytest.raises(RequestError):
            shared.map(["a"], **wrong)
