"""The coordinator as people use it, on a tiny random model unless a test says otherwise."""

from __future__ import annotations

import math
import threading
from concurrent.futures import CancelledError, Future, as_completed
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import pytest

import coremill
from coremill.config.errors import ConfigError, ModelError, RequestError
from coremill.coordinator import Completion, Coordinator

MESSAGES = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def shared(tiny_pack):
    with Coordinator(tiny_pack, ctx=400) as coordinator:
        yield coordinator


def test_the_package_hands_it_out():
    assert coremill.Coordinator is Coordinator


def test_a_prompt(shared):
    job = shared.submit("ab cd", max_tokens=5, temperature=0, custom_id="mine")
    assert isinstance(job, Future)
    result = job.result(60)
    assert isinstance(result, Completion)
    assert (result.custom_id, job.custom_id) == ("mine", "mine")
    assert result.usage.completion_tokens == len(result.token_ids) <= 5
    assert result.usage.total_tokens == result.usage.prompt_tokens + len(result.token_ids)
    assert result.finish_reason == ("length" if len(result.token_ids) == 5 else "stop")
    timing = result.timing
    assert timing.worker in (0, 1) and min(timing.queued_seconds, timing.prefill_seconds, timing.decode_seconds) >= 0


def test_a_chat_is_its_template_and_token_ids_are_taken_as_they_are(shared):
    chat = shared.submit(messages=MESSAGES, max_tokens=8, seed=4).result(60)
    text = shared.submit("hello there", max_tokens=8, seed=4).result(60)  # this model's template adds nothing
    assert chat.token_ids == text.token_ids
    ids = [5, 6, 7]
    assert shared.submit(prompt_ids=ids, max_tokens=3).result(60).usage.prompt_tokens == 3


def test_seeds(shared):
    def tokens(**more):
        return shared.submit("a", max_tokens=20, **more).result(60).token_ids

    assert tokens(seed=1) == tokens(seed=1) != tokens(seed=2)
    assert tokens(custom_id="x") == tokens(custom_id="x") != tokens(custom_id="y")
    assert tokens(seed=-1) == tokens(seed=-1)


def test_stop_strings_end_the_text(shared):
    whole = shared.submit(prompt_ids=[9], max_tokens=60, seed=3).result(60)
    stop = next(pair for pair in map("".join, pairwise(whole.text)) if pair.isascii() and pair.isalnum())
    result = shared.submit(prompt_ids=[9], max_tokens=60, seed=3, stop=[stop]).result(60)
    assert result.text == whole.text[: whole.text.index(stop)]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({}, "invalid_value"),
        ({"prompt": "a", "messages": MESSAGES}, "invalid_value"),
        ({"prompt": 5}, "invalid_value"),
        ({"prompt": "a", "temperature": 3}, "invalid_value"),
        ({"prompt": "a", "max_tokens": 0}, "invalid_value"),
        ({"messages": [{"role": "king", "content": ""}]}, "invalid_value"),
        ({"prompt": "a", "stop": [""]}, "invalid_value"),
    ],
)
def test_wrong_fields_are_refused_at_once(shared, given, code):
    with pytest.raises(RequestError) as caught:
        shared.submit(**given)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("priority", [1.5, True, "high", [1], 10**30, float("nan")]),
        ("custom_id", [5, b"x", "", "\ud800", "y" * 5000]),
        ("allow_special", ["false", "no", 1, object()]),
        ("stop", [5, b"a", {"a": 1}, ["a", 5]]),
        ("messages", [5, "abc", MESSAGES[0], [5], []]),
        ("prompt_ids", [5, "12", b"12", [1.5], ["1"], [-1], [[1]], [], np.array([1.0]), np.array([[1]])]),
        ("max_tokens", [np.float32(3), np.bool_(True), "5"]),
        ("temperature", ["1", np.float32("nan"), np.array([1.0])]),
    ],
)
def test_each_wrong_field_is_refused_by_its_name(shared, field, wrong):
    for value in wrong:
        given = (
            {field: value} if field in ("messages", "prompt_ids") else {"prompt": "a", "max_tokens": 1, field: value}
        )
        with pytest.raises(RequestError) as caught:
            shared.submit(**given)
        assert caught.value.code == "invalid_value"
        assert caught.value.param.split(".")[0] == field and f"'{field}" in caught.value.message
    assert shared.submit("a", max_tokens=1).result(60)  # nobody else has noticed


def test_what_programs_have_instead_of_json(shared):
    """Numbers of numpy, anything that can be gone through, any mapping."""
    plain = shared.submit(prompt_ids=[5, 6, 7], max_tokens=4, temperature=0.5, top_k=9, seed=3, stop=["q"]).result(60)
    same = shared.submit(
        prompt_ids=np.array([5, 6, 7]), max_tokens=np.int64(4), temperature=np.float32(0.5), top_k=np.uint8(9),
        seed=np.int64(3), stop=(stop for stop in "q"), priority=np.int32(2),
    ).result(60)  # fmt: skip
    assert same.token_ids == plain.token_ids
    chat = shared.submit(messages=iter([MappingProxyType(MESSAGES[0])]), max_tokens=4, seed=3).result(60)
    assert chat.token_ids == shared.submit(messages=MESSAGES, max_tokens=4, seed=3).result(60).token_ids


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"prompt": "xq" * 400}, "context_length_exceeded"),
        ({"prompt": "a", "max_tokens": 400}, "context_length_exceeded"),
        ({"prompt_ids": [300], "max_tokens": 1}, "invalid_value"),
    ],
)
def test_what_turns_out_wrong_later_is_raised_by_the_result(shared, given, code):
    try:
        job = shared.submit(**given)
    except RequestError as error:
        assert error.code == code
        return
    with pytest.raises(RequestError) as caught:
        job.result(60)
    assert caught.value.code == code


def test_many_threads(shared):
    reference = {n: shared.submit("a b c", max_tokens=20, seed=n).result(60).token_ids for n in range(8)}
    found: dict[tuple[int, int], tuple] = {}

    def ask(thread: int) -> None:
        jobs = {shared.submit("a b c", max_tokens=20, seed=n): n for n in range(8)}
        for job in as_completed(jobs, timeout=60):
            found[thread, jobs[job]] = job.result().token_ids

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 64
    assert all(tokens == reference[n] for (_, n), tokens in found.items())


def test_cancel(shared):
    jobs = [shared.submit("a", max_tokens=350, seed=n) for n in range(200)]
    last = jobs[-1]
    assert last.cancel() and last.cancelled()
    with pytest.raises(CancelledError):
        last.result(1)
    for job in jobs:
        job.cancel()
    done = [job for job in jobs if not job.cancelled()]
    assert all(job.result(0).token_ids for job in done)
    assert len(shared.submit("a", max_tokens=3, seed=1).result(60).token_ids) > 0


def test_stats(shared):
    assert shared.wait_ready(30)
    shared.submit("a", max_tokens=3).result(60)
    workers = shared.stats()["workers"]
    assert sum(worker["decode_tokens"] for worker in workers) > 0
    assert all(worker["pss_bytes"] for worker in workers)


def test_arguments_of_the_whole_are_checked(shared):
    for count in ("a", None, [1], True, 1.0, 0, 10**5000):
        with pytest.raises(ConfigError, match=r"^workers is .*: it must be an integer from 1 to 4096"):
            shared.workers(count)
    for timeout in ("x", 1e300, math.nan, math.inf, True, [1], 10**5000):
        for method in (shared.wait_ready, shared.drain):
            with pytest.raises(ConfigError, match=r"^timeout is .*: it must be a number of seconds up to 1e\+09, or"):
                method(timeout)
    assert shared.wait_ready(60) and shared.drain(60) and shared.wait_ready(-1)


def test_options_and_models_are_checked(tiny_pack, tmp_path):
    with pytest.raises(ConfigError, match="max_active"):
        Coordinator(tiny_pack, max_active=0)
    with pytest.raises(ConfigError):
        Coordinator(tiny_pack, no_such_option=1)
    with pytest.raises(ConfigError, match="ctx is 100000"):
        Coordinator(tiny_pack, ctx=100_000)
    with pytest.raises(ModelError):
        Coordinator(tmp_path / "missing.gguf")
    for model in (None, 5, b"x", [tiny_pack]):
        with pytest.raises(ConfigError, match=r"model is .*: it must be the path of a file"):
            Coordinator(model)
    with pytest.raises(ConfigError, match="on_event is 5"):
        Coordinator(tiny_pack, on_event=5)
