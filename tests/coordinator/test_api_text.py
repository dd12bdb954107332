"""Text of a job as it comes: whole characters, no stop strings, the same for every reader."""

from __future__ import annotations

import random
import re
import threading
from concurrent.futures import CancelledError
from itertools import pairwise

import pytest

from coremill.config.errors import EngineClosedError, RequestError
from coremill.coordinator.python.stream import TextStream


@pytest.fixture(scope="module")
def shared(tiny_pack):
    from coremill.coordinator import Coordinator

    with Coordinator(tiny_pack, ctx=400) as coordinator:
        yield coordinator


# ---- the stream alone ----


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    marks = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randint(0, 12)))
    return [data[a:b] for a, b in pairwise([0, *marks, len(data)])]


@pytest.mark.parametrize("valid", [True, False])
def test_pieces_are_the_text_wherever_its_bytes_are_cut(valid):
    rng = random.Random(5)
    for _ in range(400):
        letters = "aß€😀\u0301" if valid else "".join(map(chr, range(0x70, 0x100)))
        data = "".join(rng.choices(letters, k=20)).encode("utf-8" if valid else "latin-1")
        whole = data.decode("utf-8", "replace")
        stream = TextStream()
        for piece in cut(data, rng):
            stream.feed(piece)
        if valid:
            assert all("\ufffd" not in piece for piece in stream.after(0)[0])
        assert whole.startswith("".join(stream.after(0)[0]))
        stream.end(whole)
        pieces, ended = stream.after(0)
        assert "".join(pieces) == whole and all(pieces) and ended


def test_a_text_that_is_begun_anew_is_not_shown_twice():
    rng = random.Random(6)
    for _ in range(400):
        whole = "".join(rng.choices("aß€😀", k=20))
        stream = TextStream()
        for _ in range(rng.randint(1, 4)):
            stream.restart()
            for piece in cut(whole.encode()[: rng.randrange(80)], rng):
                stream.feed(piece)
        stream.end(whole)
        assert "".join(stream.after(0)[0]) == whole


# ---- of jobs ----


def test_a_job_gives_its_text_as_it_comes(shared):
    job = shared.submit("ab cd", max_tokens=60, seed=3)
    pieces = list(job)
    assert "".join(pieces) == job.result(60).text
    assert len(pieces) > 1 and all(pieces)
    assert "".join(job) == job.result().text  # again, when it is done


def test_a_reader_may_come_at_any_time_and_many_at_once(shared):
    jobs = [shared.submit("ab cd", max_tokens=300, seed=n) for n in range(6)]
    found: list[tuple[int, str]] = []

    def read(number: int) -> None:
        for piece in jobs[number]:  # noqa: B007
            break  # one who leaves early disturbs nobody
        found.append((number, piece + "".join(jobs[number])[len(piece) :]))

    threads = [threading.Thread(target=read, args=(number,)) for number in [*range(6)] * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == sorted((n, job.result(60).text) for n, job in enumerate(jobs) for _ in range(4))


def test_the_first_piece_comes_long_before_the_end(coordinator, monkeypatch):
    """By steps, not by time: the worker stands still in the middle."""
    monkeypatch.setenv("FAKE_HOLD_STEP", "20")
    held = coordinator(fake=True, ctx=400, stuck_after=3600)
    job = held.submit(prompt_ids=[5, 6], max_tokens=300)
    first = next(iter(job))
    assert first and not job.done()
    job.cancel()


def test_stop_strings_are_never_shown(shared):
    whole = shared.submit(prompt_ids=[9], max_tokens=200, seed=3).result(60).text
    for length in (1, 2, 3, 4):
        stop = re.search(f"[a-z]{{{length}}}", whole[len(whole) // 3 :]).group()
        job = shared.submit(prompt_ids=[9], max_tokens=200, seed=3, stop=[stop])
        shown = ""
        for piece in job:
            shown += piece
            assert whole[: whole.index(stop)].startswith(shown)
        assert shown == whole[: whole.index(stop)] == job.result().text


def test_iterating_ends_as_the_job_does(shared):
    job = shared.submit("a", max_tokens=390)
    pieces = iter(job)
    next(pieces)
    job.cancel()
    with pytest.raises(CancelledError):
        list(pieces)
    with pytest.raises(RequestError, match="context"):
        list(shared.submit("xq" * 400))


def test_iterating_ends_with_the_coordinator(coordinator):
    short = coordinator(ctx=400)
    pieces = iter(short.submit("a", max_tokens=390))
    next(pieces)
    threading.Thread(target=short.close).start()
    with pytest.raises(EngineClosedError):
        list(pieces)


def test_text_goes_on_after_the_death_of_its_worker(coordinator):
    slow = coordinator(ctx=400, workers=1)
    whole = "".join(slow.submit("ab cd", max_tokens=300, seed=3))
    job = slow.submit("ab cd", max_tokens=300, seed=3)
    pieces = iter(job)
    shown = next(pieces)
    slow._backend.engine._shell.pool.processes[0].process.kill()
    assert shown + "".join(pieces) == whole
    assert slow.stats()["workers"][0]["restarts"] == 1


def test_counting_and_templates(shared):
    messages = [{"role": "user", "content": "hello there"}]
    text = shared.apply_template(messages)
    assert "hello there" in text
    for given in ({"messages": messages}, {"prompt": "a b c"}):
        job = shared.submit(**given, max_tokens=1)
        assert shared.count_tokens(**given) == job.result(60).usage.prompt_tokens
    for wrong in ({}, {"prompt": 5}, {"prompt": "a", "messages": messages}):
        with pytest.raises(RequestError):
            shared.count_tokens(**wrong)
    with pytest.raises(RequestError, match=r"messages\.0\.role"):
        shared.apply_template([{"role": "king", "content": ""}])
