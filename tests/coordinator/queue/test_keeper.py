"""What becomes of kept jobs: with the real store, threads and forms, and a runner that does as it is told."""

from __future__ import annotations

import sqlite3
import threading
import time
from concurrent.futures import wait
from contextlib import closing

import pytest

from coremill.config.errors import EngineClosedError, EngineError, QueueFileError, RequestError
from coremill.config.joboptions import JobOptions
from coremill.config.request import COMPLETIONS_URL, SamplingParams, parse_body
from coremill.coordinator.python.job import Completion, Timing, Usage
from coremill.coordinator.queue.forms import (
    form_of,
    options_form,
    options_of,
    outcome_form,
    outcome_of,
    request_of,
    to_json,
)
from coremill.coordinator.queue.keeper import Keeper
from coremill.coordinator.queue.rules import Order, asked
from coremill.coordinator.queue.store import Store

WAIT = 60


def wait_until(condition) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def ask(text: str, **fields):
    return parse_body(COMPLETIONS_URL, {"prompt": text, **fields}, custom_id=text)


def done(id: str) -> Completion:
    return Completion(id, f"text of {id}", (1, 2), "length", Usage(3, 2, 1), Timing(0.0, 0.1, 0.2, 1))


class Runner:
    """Holds jobs until the test ends them, or ends them at once."""

    def __init__(self, at_once: bool = False) -> None:
        self.at_once, self.begun, self.cancelled, self.watched, self.closed = at_once, {}, [], [], False

    def begin(self, jobs) -> None:
        for job in jobs:
            assert job.id not in self.begun, "begun twice"
            self.begun[job.id] = job
            if self.at_once:
                self.end(job.id)

    def end(self, id: str) -> None:
        self.begun[id].finish(done(id))

    def watch(self, job) -> None:
        self.watched.append(job.id)

    def cancel(self, job) -> None:
        self.cancelled.append(job.id)

    def close(self, wait: bool) -> None:
        self.closed = True
        for job in self.begun.values():
            job.finish(EngineClosedError("closed"))


class Follower:
    def __init__(self, watched: bool = False) -> None:
        self.watched, self.text, self.outcomes = watched, b"", []
        self.told = threading.Event()

    def restart_text(self) -> None:
        self.text = b""

    def feed_text(self, data: bytes) -> None:
        self.text += data

    def finish(self, outcome) -> None:
        self.outcomes.append(outcome)
        self.told.set()

    @property
    def outcome(self):
        assert self.told.wait(WAIT)
        (outcome,) = self.outcomes
        return outcome


@pytest.fixture
def keeper(tmp_path):
    """open(runner, **options) -> a Keeper of the one queue file of the test."""
    opened = []

    def start(runner, **options) -> Keeper:
        opened.append(Keeper(runner, Store(tmp_path / "jobs.sqlite"), **options))
        return opened[-1]

    yield start
    for each in opened:
        each.close(True)


def submit(keeper, *ids: str, follower=None, **options) -> list[bool]:
    return keeper.submit([Order(id, ask(id), JobOptions(**options), follower) for id in ids]).result(WAIT)


# ---- forms ----


def test_requests_and_outcomes_come_back_equal():
    bodies = [
        {"prompt": "a"},
        {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": -4},
        {"prompt": "ü\u2028\0", "stop": ["x", "ÿ"], "metadata": {"a": "b"}, "user": "me", "allow_special": True},
    ]
    requests = [parse_body(COMPLETIONS_URL, body, custom_id="id") for body in bodies]
    requests.append(
        parse_body(
            "/v1/chat/completions",
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "model": "m"},
            custom_id="chat",
            defaults=SamplingParams(max_tokens=9, stop=("q",)),
        )
    )
    for request in requests:
        assert request_of(form_of(request)) == request
        assert outcome_of(outcome_form(done("id")), request).text == "text of id"
    assert len({to_json(form_of(request)) for request in requests}) == 4
    options = JobOptions(3, 12.5, 2, 1)
    assert options_of(options_form(options)) == options
    error = outcome_of(outcome_form(RequestError("code", "message", "param")), requests[0])
    assert (error.code, error.message, error.param) == ("code", "message", "param")
    for wrong in (None, [], {}, {"custom_id": "a", "url": "/v1/completions"}, {**form_of(requests[0]), "body": 5}):
        with pytest.raises(RequestError):
            request_of(wrong)
    for wrong in ({}, {**options_form(options), "retries": "1"}, {**options_form(options), "more": 1}):
        with pytest.raises(RequestError):
            options_of(wrong)


# ---- ids ----


def test_an_id_names_one_request(keeper):
    runner = Runner()
    queue = keeper(runner)
    first, second, third = Follower(), Follower(), Follower()
    assert submit(queue, "a", follower=first) == [True]
    assert submit(queue, "a", follower=second) == [False]
    assert submit(queue, "b", "a", "b", follower=None, priority=7) == [True, False, False]
    wait_until(lambda: runner.begun.keys() == {"a", "b"})
    with pytest.raises(RequestError, match="'a' is in use by a job with another request") as caught:
        queue.submit([Order("new", ask("new"), JobOptions()), Order("a", ask("a", seed=1), JobOptions())]).result(WAIT)
    assert caught.value.code == "id_in_use"
    with pytest.raises(RequestError, match="another request"):
        queue.submit([Order("c", ask("c"), JobOptions()), Order("c", ask("d"), JobOptions())]).result(WAIT)
    with pytest.raises(RequestError, match="no job 'new'"):  # none of them was taken
        queue.follow("new", lambda row: Follower()).result(WAIT)
    runner.end("a")
    assert first.outcome == second.outcome == done("a")
    assert submit(queue, "a", follower=third) == [False]
    assert third.outcome == done("a")
    assert list(runner.begun) == ["a", "b"]


def test_an_acknowledged_or_cancelled_id_does_not_run_again(keeper):
    runner = Runner()
    queue = keeper(runner)
    submit(queue, "a", "b")
    with pytest.raises(RequestError, match="'a' is not done") as caught:
        queue.acknowledge(["a"]).result(WAIT)
    assert caught.value.code == "job_unfinished"
    runner.end("a")
    queue.cancel("b").result(WAIT)
    wait_until(lambda: queue.stats()["done"] == 1)
    with pytest.raises(RequestError, match="no job 'c'"):
        queue.acknowledge(["a", "c"]).result(WAIT)
    assert queue.stats()["done"] == 1
    for _ in range(2):
        queue.acknowledge(["a", "a"]).result(WAIT)
    for id in ("a", "b"):
        with pytest.raises(RequestError, match=f"'{id}' has been acknowledged or cancelled") as caught:
            submit(queue, id)
        assert caught.value.code == "job_settled"
        with pytest.raises(RequestError, match="no job"):
            queue.follow(id, lambda row: Follower()).result(WAIT)
    assert runner.cancelled == ["b"]
    assert queue.stats() == {"waiting": 0, "begun": 0, "done": 0}


# ---- ends ----


def test_nobody_hears_of_what_is_not_written(keeper):
    """A transaction that fails is as if nothing had come in; what has ended is written later."""
    runner, follower = Runner(), Follower()
    queue = keeper(runner)
    submit(queue, "a", follower=follower)
    wait_until(lambda: "a" in runner.begun)
    queue._store._db.execute("PRAGMA query_only = ON")
    runner.end("a")
    with pytest.raises(QueueFileError):
        for _ in range(100):  # some may be in a transaction of their own, which is tried again
            submit(queue, "b")
    assert follower.outcomes == []
    queue._store._db.execute("PRAGMA query_only = OFF")
    assert follower.outcome == done("a")
    assert submit(queue, "b") == [True]


def test_what_is_unfinished_runs_again_and_what_is_done_does_not(keeper):
    runner, follower = Runner(), Follower()
    queue = keeper(runner, window=2)
    submit(queue, "a", "b", "c", "d", follower=None)
    queue.follow("b", lambda row: follower).result(WAIT)
    wait_until(lambda: runner.begun.keys() == {"a", "b"})
    runner.end("a")
    wait_until(lambda: "c" in runner.begun)
    queue.close(True)
    assert isinstance(follower.outcome, EngineClosedError)
    assert runner.closed and "d" not in runner.begun
    with pytest.raises(EngineClosedError):
        submit(queue, "e")
    again, follower = Runner(at_once=True), Follower()
    queue = keeper(again, window=2)
    queue.idle().result(WAIT)
    assert list(again.begun) == ["b", "c", "d"]
    assert queue.follow("a", lambda row: follower).result(WAIT) is follower
    assert follower.outcome.text == "text of a"
    assert queue.stats() == {"waiting": 0, "begun": 0, "done": 4}


def test_a_failed_job_is_done_and_a_failed_engine_is_not_its_fault(keeper):
    runner, followers = Runner(), [Follower() for _ in range(4)]
    queue = keeper(runner, window=3)
    for id, follower in zip("abcd", followers, strict=True):
        submit(queue, id, follower=follower)
    wait_until(lambda: len(runner.begun) == 3)
    runner.begun["a"].finish(RequestError("context_length_exceeded", "too long", "prompt"))
    assert followers[0].outcome.code == "context_length_exceeded"
    runner.begun["b"].finish(ValueError("what"))
    assert followers[1].outcome.code == "internal_error" and "ValueError: what" in followers[1].outcome.message
    runner.begun["c"].finish(EngineError("no workers left"))
    assert isinstance(followers[2].outcome, EngineError) and isinstance(followers[3].outcome, EngineError)
    with pytest.raises(EngineError, match="no workers left"):
        submit(queue, "e")
    idle = Follower()
    queue.close(True)
    again = Runner(at_once=True)
    queue = keeper(again)
    queue.idle().result(WAIT)
    assert list(again.begun) == ["c", "d"]
    queue.follow("a", lambda row: idle).result(WAIT)
    assert idle.outcome.param == "prompt"


def test_who_asks_in_the_turn_in_which_the_engine_fails_is_told(keeper):
    runner, hold, held = Runner(), threading.Event(), threading.Event()
    queue, begun, joined = keeper(runner), Follower(), Follower()
    submit(queue, "a", follower=begun)
    wait_until(lambda: "a" in runner.begun)
    # The writer's thread is kept from its next turn until all three of these have come in.
    queue._writer.post(then=lambda _: (held.set(), hold.wait(WAIT)))
    assert held.wait(WAIT)
    runner.begun["a"].finish(EngineError("no workers left"))
    accepted = queue.submit([Order("b", ask("b"), JobOptions(), joined)])
    idle = queue.idle()
    hold.set()
    assert accepted.result(WAIT) == [True]
    assert isinstance(begun.outcome, EngineError) and isinstance(joined.outcome, EngineError)
    with pytest.raises(EngineError, match="no workers left"):
        idle.result(WAIT)


def test_a_damaged_row_is_its_own_error(keeper, tmp_path):
    queue = keeper(Runner(at_once=True))
    submit(queue, "a", "b", "c", "d")
    queue.idle().result(WAIT)
    queue.close(True)
    with closing(sqlite3.connect(tmp_path / "jobs.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE jobs SET outcome = '{' WHERE id = 'a'")
        db.execute("UPDATE jobs SET request = '{}' WHERE id = 'b'")
        db.execute("UPDATE jobs SET request = '{}', state = 0, outcome = NULL, place = NULL WHERE id = 'c'")
    queue = keeper(Runner(at_once=True))
    told = Follower()
    queue.follow("a", lambda row: told).result(WAIT)
    assert told.outcome.code == "damaged"
    with pytest.raises(RequestError, match=r"job 'b' cannot be read \(") as error:
        queue.follow("b", asked).result(WAIT)
    assert error.value.code == "damaged"
    queue.idle().result(WAIT)
    queue.follow("c", lambda row: told).result(WAIT)
    wait_until(lambda: len(told.outcomes) == 2)
    assert told.outcomes[1].code == "damaged"
    for id in "ab":
        queue.cancel(id).result(WAIT)
    assert queue.stats() == {"waiting": 0, "begun": 0, "done": 2}
    submit(queue, "e")
    queue.idle().result(WAIT)


def test_a_bug_in_the_queue_is_told_to_all_who_wait(keeper, caplog):
    queue, hold, held = keeper(Runner()), threading.Event(), threading.Event()
    queue._writer.post(then=lambda _: (held.set(), hold.wait(WAIT)))
    assert held.wait(WAIT)
    first = queue.caught_up()
    before = [queue.idle(), queue.claim("reader", 1)]  # taken, but not answered yet
    wrong = queue._writer.post(then=lambda _: 1 / 0)
    after = [queue.caught_up(), queue.idle(), queue.claim("other", 1), queue.follow("a", asked)]
    hold.set()
    assert first.result(WAIT) is None
    for answer in (*before, wrong, *after):
        with pytest.raises(EngineError):
            answer.result(WAIT)
    assert "ZeroDivisionError" in str(wrong.exception())


def test_a_runner_that_takes_nothing(keeper):
    class Refusing(Runner):
        def begin(self, jobs):
            (job,) = jobs
            if job.id == "a":
                raise RequestError("context_length_exceeded", "too long", "prompt")
            raise EngineClosedError("the engine is closed")

    queue = keeper(Refusing(), window=1)
    first, second = Follower(), Follower()
    queue.submit([Order("a", ask("a"), JobOptions(), first)]).result(WAIT)
    assert first.outcome.code == "context_length_exceeded"
    queue.submit([Order("b", ask("b"), JobOptions(), second)]).result(WAIT)
    assert isinstance(second.outcome, EngineClosedError)


def test_cancel_tells_whoever_else_waits(keeper):
    runner, begun, waiting = Runner(), Follower(), Follower()
    queue = keeper(runner, window=1)
    submit(queue, "a", follower=begun)
    submit(queue, "b", follower=waiting)
    wait_until(lambda: "a" in runner.begun)
    queue.cancel("b").result(WAIT)
    queue.cancel("a").result(WAIT)
    queue.cancel("unknown").result(WAIT)
    assert begun.outcome.code == waiting.outcome.code == "cancelled"
    runner.end("a")  # too late
    assert queue.idle().result(WAIT) is None
    assert len(begun.outcomes) == 1 and queue.stats()["done"] == 0
    gone = Follower()
    submit(queue, "c", follower=gone)
    queue.unfollow("c", gone)
    wait_until(lambda: "c" in runner.begun)
    runner.end("c")
    wait_until(lambda: queue.stats()["done"] == 1)
    assert gone.outcomes == []


# ---- who is next ----


def test_a_window_of_jobs_and_the_urgent_ones_beyond_it(keeper):
    runner = Runner()
    queue = keeper(runner, window=2)
    submit(queue, *(f"job {n}" for n in range(6)))
    wait_until(lambda: len(runner.begun) == 2)
    submit(queue, "urgent", priority=1)
    wait_until(lambda: "urgent" in runner.begun)
    submit(queue, "later", priority=-1)
    for id in ("job 0", "urgent"):
        runner.end(id)
    wait_until(lambda: len(runner.begun) == 4)
    assert list(runner.begun) == ["job 0", "job 1", "urgent", "job 2"]
    assert queue.stats() == {"waiting": 4, "begun": 2, "done": 2}
    for n in range(1, 6):
        wait_until(lambda n=n: f"job {n}" in runner.begun)
        runner.end(f"job {n}")
    wait_until(lambda: "later" in runner.begun)
    runner.end("later")
    queue.idle().result(WAIT)


def test_urgent_jobs_have_a_window_too(keeper):
    runner = Runner()
    queue = keeper(runner, window=3)
    submit(queue, *(f"job {n}" for n in range(4)))
    submit(queue, *(f"urgent {n}" for n in range(8)), priority=1)
    for _ in range(3):  # a turn each
        queue.caught_up().result(WAIT)
    assert len(runner.begun) == 6
    submit(queue, "most urgent", priority=2)
    wait_until(lambda: "most urgent" in runner.begun)
    runner.end("urgent 0")
    for _ in range(3):
        queue.caught_up().result(WAIT)
    assert len(runner.begun) == 7
    # Their ends come in one turn, which begins others in their places.
    queue._writer.post(then=lambda _: (runner.end("urgent 1"), runner.end("urgent 2")))
    wait_until(lambda: "urgent 4" in runner.begun)
    for _ in range(3):
        queue.caught_up().result(WAIT)
    assert len(runner.begun) == 9


def test_deadlines_while_it_waits_in_the_file(keeper):
    runner, follower = Runner(), Follower()
    queue = keeper(runner, window=1)
    submit(queue, "first")
    submit(queue, "late", follower=follower, deadline=time.time() + 0.05)
    assert follower.outcome.code == "deadline_exceeded"
    runner.end("first")
    queue.idle().result(WAIT)
    assert list(runner.begun) == ["first"]


def test_outcomes_are_kept_for_a_set_time(keeper):
    queue = keeper(Runner(at_once=True), keep=0.05)
    submit(queue, "a")
    queue.idle().result(WAIT)
    wait_until(lambda: queue.follow("a", lambda row: Follower()).exception(WAIT) is not None)
    assert queue.stats()["done"] == 0
    with pytest.raises(RequestError, match="acknowledged or cancelled"):
        submit(queue, "a")


# ---- text ----


def test_the_text_goes_to_all_who_watch_from_its_beginning(keeper):
    runner, early, late, never = Runner(), Follower(watched=True), Follower(), Follower()
    queue = keeper(runner)
    submit(queue, "a", follower=early)
    wait_until(lambda: "a" in runner.begun)
    assert runner.begun["a"].watched
    runner.begun["a"].feed_text(b"ab")
    for follower in (late, never):
        queue.follow("a", lambda row, follower=follower: follower).result(WAIT)
    late.watched = True
    queue.watch("a", late)
    runner.begun["a"].feed_text(b"cd")
    assert (early.text, late.text, never.text) == (b"abcd", b"abcd", b"")
    runner.begun["a"].restart_text()
    runner.begun["a"].feed_text(b"abcde")
    assert early.text == late.text == b"abcde"
    submit(queue, "b")
    wait_until(lambda: "b" in runner.begun)
    runner.begun["b"].feed_text(b"unread")
    other = Follower(watched=True)
    queue.follow("b", lambda row: other).result(WAIT)
    assert runner.watched == ["b"]
    queue.unfollow("b", other)
    runner.begun["b"].feed_text(b"more")
    assert other.text == b""


# ---- readers ----


def test_each_outcome_goes_to_one_reader_until_it_is_acknowledged(keeper):
    runner = Runner(at_once=True)
    queue = keeper(runner)
    waiting = queue.claim("one", 2)
    never = queue.claim("two", 2)
    assert never.cancel() and not waiting.done()
    submit(queue, *"abcde")
    first = [row.id for row in waiting.result(WAIT)]
    second = [row.id for row in queue.claim("two", 10).result(WAIT)]
    assert (first, second) == (["a", "b"], ["c", "d", "e"])
    third = queue.claim("three", 10)
    queue.acknowledge(["a", "c"]).result(WAIT)
    assert not third.done()
    queue.release("one")
    assert [row.id for row in third.result(WAIT)] == ["b"]
    queue.release("nobody")
    queue.close(True)
    with pytest.raises(EngineClosedError):
        queue.claim("one", 1)
    queue = keeper(runner)
    assert [row.id for row in queue.claim("one", 10).result(WAIT)] == ["b", "d", "e"]
    asked = queue.claim("one", 1)
    queue.close(True)
    assert isinstance(asked.exception(WAIT), EngineClosedError)


def test_many_producers_and_readers_at_once(keeper):
    """Everything is read exactly once."""
    runner = Runner(at_once=True)
    queue = keeper(runner, window=16)
    producers, jobs = 8, 100
    read: list[str] = []

    def produce(number: int) -> None:
        for n in range(jobs):
            for producer in (number, (number + 1) % producers):  # and what another submits, too
                error = queue.submit([Order(f"{producer}-{n}", ask(f"{producer}-{n}"), JobOptions())]).exception(WAIT)
                assert error is None or error.code == "job_settled"  # the other's has been read already

    def reader(number: int) -> None:
        while len(read) < producers * jobs:
            asked = queue.claim(f"reader {number}", 7)
            if wait([asked], 0.05).not_done and asked.cancel():
                continue
            rows = asked.result(WAIT)
            kept = [row.id for row in rows[: 1 + len(rows) // 2]]
            queue.acknowledge(kept).result(WAIT)
            read.extend(kept)
            queue.release(f"reader {number}")

    threads = [threading.Thread(target=produce, args=(n,)) for n in range(producers)]
    threads += [threading.Thread(target=reader, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert sorted(read) == sorted(f"{p}-{n}" for p in range(producers) for n in range(jobs))
    assert len(runner.begun) == producers * jobs
    assert queue.stats() == {"waiting": 0, "begun": 0, "done": 0}


def test_a_callback_may_submit_and_close(keeper):
    runner = Runner(at_once=True)
    queue = keeper(runner)
    ends = []

    class Chain(Follower):
        def finish(self, outcome):
            ends.append(outcome)
            if len(ends) < 20:
                submit(queue, f"job {len(ends)}", follower=Chain())
            else:
                assert queue.is_own_thread
                queue.close(True)
                super().finish(outcome)

    first = Chain()
    submit(queue, "job 0", follower=first)
    wait_until(lambda: len(ends) == 20)
    wait_until(lambda: runner.closed)


def test_a_cancelled_job_makes_room(keeper):
    runner = Runner()
    queue = keeper(runner, window=1)
    submit(queue, "a", "b")
    wait_until(lambda: "a" in runner.begun)
    queue.cancel("a").result(WAIT)
    wait_until(lambda: "b" in runner.begun)
