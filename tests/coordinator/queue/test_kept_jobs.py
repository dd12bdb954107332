"""Coordinator(queue=...): kept jobs as a program sees them, with real worker processes and make-believe models."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from coremill.config.errors import (
    ConfigError,
    EngineClosedError,
    EngineError,
    QueueFileError,
    QueueFullError,
    RequestError,
    ResumeRefusedError,
)
from coremill.coordinator import AsyncCoordinator

WAIT = 60


@pytest.fixture
def queue(coordinator, tmp_path):
    """start(**options) -> a Coordinator on the one queue file of the test."""

    def start(**options):
        return coordinator(fake=True, queue=tmp_path / "jobs.sqlite", ctx=400, **options)

    return start


def test_jobs_survive_their_coordinator_and_are_found_by_id(queue, coordinator, monkeypatch):
    plain = coordinator(fake=True, ctx=400)
    expected = {n: plain.submit(prompt_ids=[n], max_tokens=30, custom_id=f"id-{n}").result(WAIT) for n in range(1, 9)}
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.01")
    first = queue(max_active=2)
    jobs = [first.submit(prompt_ids=[n], max_tokens=30, id=f"id-{n}", metadata={"n": str(n)}) for n in range(1, 9)]
    assert all(job.kept and job.id == job.custom_id for job in jobs)
    jobs[0].result(WAIT)
    first.close()
    ended = [job for job in jobs if job.exception(WAIT) is None]
    assert ended and all(isinstance(job.exception(WAIT), EngineClosedError) for job in jobs if job not in ended)
    monkeypatch.delenv("FAKE_STEP_SECONDS")
    second = queue(max_active=2)
    assert second.drain(WAIT)
    for n, job in enumerate(jobs, 1):
        again = second.job(job.id)
        result = again.result(WAIT)
        assert (result.text, result.token_ids) == (expected[n].text, expected[n].token_ids)
        assert result.metadata == again.metadata == {"n": str(n)} and result.custom_id == job.id
    assert second.stats()["queue"]["kept"] == {"waiting": 0, "begun": 0, "done": 8}
    assert second.stats()["queue"]["unfinished"] == 0
    second.job("id-1").acknowledge()
    second.acknowledge("id-1", *jobs[1:])
    assert second.stats()["queue"]["kept"]["done"] == 0
    with pytest.raises(RequestError, match="no job 'id-1'"):
        second.job("id-1")


def test_the_same_id_is_the_same_job(queue):
    c = queue()
    one = c.submit(prompt_ids=[5], max_tokens=20, id="a")
    two = c.submit(prompt_ids=[5], max_tokens=20, id="a", priority=3)
    assert one.result(WAIT) == two.result(WAIT) == c.job("a").result(WAIT)
    with pytest.raises(RequestError, match="'a' is in use by a job with another request"):
        c.submit(prompt_ids=[6], max_tokens=20, id="a")
    assert c.drain(WAIT) and c.stats()["queue"]["unfinished"] == 0
    assert sum(worker["decode_tokens"] for worker in c.stats()["workers"]) <= 20
    for wrong in ("", "x" * 1025, 5, "\ud800"):
        with pytest.raises(RequestError, match="'id'"):
            c.submit(prompt_ids=[5], id=wrong)
    unnamed = c.submit(prompt_ids=[5], max_tokens=2)
    assert unnamed.kept and c.job(unnamed.id).result(WAIT) == unnamed.result(WAIT)


def test_text_as_it_comes_for_whoever_follows(queue, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.005")
    c = queue()
    job = c.submit(prompt_ids=[9], max_tokens=60, id="a", seed=3)
    pieces = iter(job)
    begun = next(pieces)
    other = c.job("a")
    assert "".join(other) == begun + "".join(pieces) == job.result(WAIT).text
    assert "".join(c.job("a")) == job.result(WAIT).text  # long over


def test_cancel_is_remembered(queue, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.02")
    c = queue(max_active=1)
    jobs = [c.submit(prompt_ids=[n], max_tokens=300, id=f"id-{n}") for n in (1, 2, 3)]
    watcher = c.job("id-1")
    assert jobs[0].cancel() and jobs[2].cancel()
    with pytest.raises(CancelledError):
        jobs[0].result(WAIT)
    with pytest.raises(RequestError, match="'id-1' was cancelled"):
        watcher.result(WAIT)
    c.close()
    monkeypatch.delenv("FAKE_STEP_SECONDS")
    c = queue()
    assert c.drain(WAIT)
    assert c.job("id-2").result(WAIT)
    for id in ("id-1", "id-3"):
        with pytest.raises(RequestError, match="no job"):
            c.job(id)
        with pytest.raises(RequestError, match="acknowledged or cancelled"):
            c.submit(prompt_ids=[int(id[-1])], max_tokens=300, id=id)


def test_failed_jobs_are_outcomes_too(queue):
    c = queue()
    with pytest.raises(RequestError, match="context has 400"):
        c.submit(prompt_ids=[5], max_tokens=500, id="long").result(WAIT)
    c.close()
    c = queue()
    with pytest.raises(RequestError, match="context has 400") as caught:
        c.job("long").result(WAIT)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(RequestError, match="deadline"):
        c.submit(prompt_ids=[5], max_tokens=390, id="late", timeout=1e-9).result(WAIT)


def test_submit_all(queue):
    c = queue(max_queue=30)
    rows = [{"id": f"id-{n}", "prompt": [n % 50 + 1], "max_tokens": 2, "priority": n % 3} for n in range(100)]
    jobs = c.submit_all(rows, temperature=0)
    assert [job.id for job in jobs] == [f"id-{n}" for n in range(100)]
    assert {job.options.priority for job in jobs} == {0, 1, 2} and jobs[0].request.sampling.temperature == 0
    assert c.drain(WAIT)
    assert all(job.result(0).token_ids for job in jobs)
    texts = c.submit_all(["a", {"prompt": "b", "custom_id": "mine"}], max_tokens=1)
    assert [job.custom_id for job in texts] == ["line-1", "mine"] and all(job.result(WAIT) for job in texts)
    done = c.stats()["queue"]["kept"]["done"]
    with pytest.raises(RequestError, match="'max_tokens' is 0"):
        c.submit_all([{"id": "new", "prompt": "a"}, {"prompt": "b", "max_tokens": 0}])
    with pytest.raises(RequestError, match="id-5' is in use"):
        c.submit_all([{"id": "new", "prompt": "a"}, {"id": "id-5", "prompt": "b"}])
    with pytest.raises(TypeError, match="temperatur"):
        c.submit_all([], temperatur=0)
    assert c.drain(WAIT) and c.stats()["queue"]["kept"]["done"] == done
    assert c.stats()["queue"]["unfinished"] == 0
    c.wait_ready(WAIT)
    os.kill(c.stats()["workers"][0]["pid"], signal.SIGSTOP)
    try:
        with pytest.raises(QueueFullError, match="max_queue is 30"):
            c.submit_all([{"id": f"more-{n}", "prompt": [1], "max_tokens": 1} for n in range(99)], wait=0.05)
        assert c.job("more-29").id == "more-29"  # those before have been submitted
    finally:
        os.kill(c.stats()["workers"][0]["pid"], signal.SIGCONT)


def test_readers(queue):
    c = queue()
    jobs = c.submit_all([{"id": f"id-{n}", "prompt": [n + 1], "max_tokens": 3} for n in range(9)])
    c.drain(WAIT)
    assert list(zip((job.id for job in c.results(timeout=0)), range(3), strict=False))  # given up: back with them
    with c.results(timeout=0) as first:
        some = [next(first) for _ in range(4)]
        assert len({job.id for job in some}) == 4 and all(job.kept and job.done() for job in some)
        assert list(c.results(timeout=0)) == []  # they are all with the first
        for job in some[:3]:
            job.acknowledge()
    others = list(c.results(timeout=0))
    assert sorted(job.id for job in [*some[:3], *others]) == [job.id for job in jobs]
    assert {job.id: job.result(0) for job in others}.items() <= {job.id: job.result(0) for job in jobs}.items()
    c.acknowledge(*others)
    new = []
    thread = threading.Thread(target=lambda: new.append(next(c.results())))
    thread.start()
    c.submit(prompt_ids=[5], max_tokens=1, id="later")
    thread.join(WAIT)
    assert [job.id for job in new] == ["later"]


def test_a_reader_passes_over_a_damaged_row(queue, tmp_path):
    with queue() as c:
        c.submit_all([{"id": id, "prompt": [5], "max_tokens": 1} for id in "abc"])
        c.drain(WAIT)
    with closing(sqlite3.connect(tmp_path / "jobs.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE jobs SET request = 'x' WHERE id = 'b'")
        db.execute("UPDATE jobs SET outcome = '{}' WHERE id = 'c'")
    c = queue()
    with c.results(timeout=0) as results:
        assert next(results).id == "a"
        with pytest.raises(RequestError, match="job 'b' cannot be read"):
            next(results)
        with pytest.raises(RequestError, match="job 'c' cannot be read"):
            next(results).result(0)
    c.acknowledge("b")


def test_what_a_reader_is_given_once_it_is_closed_goes_to_others(queue, monkeypatch):
    c = queue()
    c.submit("ab", max_tokens=1, id="a").result(WAIT)
    results, claim = c.results(), c._backend.claim
    with monkeypatch.context() as patch:
        patch.setattr(c._backend, "claim", lambda *args: (results.close(), claim(*args))[1])
        assert not results.fetch(WAIT)
    with c.results(timeout=WAIT) as others:
        assert next(others).id == "a"


def test_rows_of_map_are_not_kept(queue):
    c = queue()
    assert len(list(c.map([f"text {n}" for n in range(20)], max_tokens=2))) == 20
    assert c.stats()["queue"]["kept"] == {"waiting": 0, "begun": 0, "done": 0}
    job = c.submit("a", max_tokens=1)
    job.kept = False
    with pytest.raises(RequestError, match="is not kept"):
        job.acknowledge()


def test_under_asyncio(coordinator, queue):
    c = queue()

    async def main() -> None:
        asynchronous = AsyncCoordinator.over(c)
        job = await asynchronous.submit(prompt_ids=[5], max_tokens=4, id="a")
        more = await asynchronous.submit_all([{"id": "b", "prompt": [6], "max_tokens": 2}])
        assert await job == await (await asynchronous.job("a"))
        await more[0]
        await asynchronous.drain()
        seen = [job async for job in asynchronous.results(timeout=0)]
        assert sorted(job.id for job in seen) == ["a", "b"]
        await asynchronous.acknowledge(*seen)
        assert [job async for job in asynchronous.results(timeout=0.01)] == []

    asyncio.run(main())


def test_a_submit_that_is_given_up_costs_no_place(queue, monkeypatch):
    """Cancelled before its thread has begun, or while that waits for the disk: it runs to its end, unless nobody could
    ask for it."""
    c = queue(max_queue=3)
    writing, go = threading.Event(), threading.Event()
    begin = c._backend.begin
    monkeypatch.setattr(c._backend, "begin", lambda jobs: (writing.set(), go.wait(WAIT), begin(jobs)))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        asynchronous = AsyncCoordinator.over(c)
        submits = [asynchronous.submit(prompt_ids=[5], max_tokens=1, id=id) for id in ("a", "b", None)]
        tasks = [asyncio.create_task(submit) for submit in submits]
        assert await loop.run_in_executor(ThreadPoolExecutor(1), writing.wait, WAIT)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == 3 * [asyncio.CancelledError]
        go.set()
        await loop.run_in_executor(None, lambda: None)  # after those three
        await asynchronous.drain()

    asyncio.run(main())
    assert c._roster.num_unfinished == 0
    assert [c.job(id).result(WAIT).usage.completion_tokens for id in "ab"] == [1, 1]
    assert c.stats()["queue"]["kept"]["done"] == 2


def test_a_queue_is_refused_by_another_engine_unless_nothing_is_unfinished(queue, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.05")
    c = queue()
    c.submit(prompt_ids=[5], max_tokens=390, id="a")
    c.close()
    monkeypatch.delenv("FAKE_STEP_SECONDS")
    with pytest.raises(ResumeRefusedError, match=r"fingerprint .* was fp_\w+ and is fp_\w+\. Use"):
        queue(kv="q8")
    with pytest.raises(ResumeRefusedError, match="--seed was 0 and is 7"):
        queue(seed=7)
    c = queue()
    assert c.drain(WAIT)
    c.close()
    c = queue(seed=7)
    assert c.job("a").result(WAIT)
    c.submit(prompt_ids=[5], max_tokens=1, id="b").result(WAIT)


def test_what_is_refused(coordinator, queue, tmp_path):
    c = queue()
    with pytest.raises(QueueFileError, match="in use by this process"):
        queue()
    (tmp_path / "text").write_text("hello")
    with pytest.raises(QueueFileError, match="text"):
        coordinator(queue=tmp_path / "text")
    for wrong in (5, "", b"x"):
        with pytest.raises(ConfigError, match="queue is"):
            coordinator(queue=wrong)
    for wrong in (0, -1, "1", True, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="keep is"):
            coordinator(queue=tmp_path / "other", keep=wrong)
    with pytest.raises(ConfigError, match="keep is 5"):
        coordinator(keep=5)
    plain = coordinator(fake=True)
    for call in (
        lambda: plain.submit("a", id="x"),
        lambda: plain.job("x"),
        lambda: plain.results(),
        lambda: plain.acknowledge("x"),
        lambda: plain.submit_all([{"id": "x", "prompt": "a"}]),
    ):
        with pytest.raises(RequestError, match="keeps no jobs"):
            call()
    assert plain.submit_all(["a", "b"], max_tokens=1)[1].result(WAIT)
    c.close()
    with pytest.raises(EngineClosedError):
        c.submit("a", id="x")
    with pytest.raises(EngineClosedError):
        c.job("x")


def test_ctrl_c_cancels_no_kept_job(queue, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.01")
    c = queue()
    job = c.submit(prompt_ids=[5], max_tokens=100, id="a")
    timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        job.result(WAIT)
    assert job.result(WAIT).token_ids
    timer.join()


def test_a_forked_child_disturbs_nothing(queue):
    c = queue()
    c.submit(prompt_ids=[5], max_tokens=2, id="a").result(WAIT)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            c.submit("b")
        except EngineError:
            c.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert c.submit(prompt_ids=[5], max_tokens=2, id="b").result(WAIT)


def test_a_disk_that_is_full_refuses_and_what_ends_is_written_later(queue):
    c = queue()
    store = c._backend.keeper._store
    job = c.submit(prompt_ids=[5], max_tokens=2, id="a")
    job.result(WAIT)
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(QueueFileError, match="full"):
        for n in range(1000):
            c.submit(prompt_ids=[5] * 300, max_tokens=2, id=f"more-{n}")
    store._db.execute("PRAGMA max_page_count = 100000")
    assert c.drain(WAIT)
    assert c.submit(prompt_ids=[5], max_tokens=2, id="b").result(WAIT)


HOST = Path(__file__).parent / "host.py"


def test_kill_of_everything_at_once(tiny_pack, tmp_path, queue):
    """Whatever had been accepted is there; what was done is not run again."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "FAKE_STEP_SECONDS": "0.005"}
    command = [sys.executable, str(HOST), str(tiny_pack), str(tmp_path / "jobs.sqlite"), "produce"]
    host = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    accepted, done = [], {}
    for line in host.stdout:
        kind, id, *text = line.rstrip("\n").split(" ", 2)
        if kind == "accepted":
            accepted.append(id)
        else:
            done[id] = text[0]
        if len(done) == 20 and host.poll() is None:
            host.kill()
    host.wait()
    assert len(done) >= 20 and len(accepted) > len(done)
    c = queue()
    before = c.stats()["queue"]["kept"]
    assert before["done"] >= len(done)
    assert c.drain(WAIT)
    read = {job.id: job.result(0).text for job in c.results(timeout=0)}
    assert set(accepted) <= read.keys() and len(read) - len(accepted) in (0, 1)
    assert done.items() <= read.items()
