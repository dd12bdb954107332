"""Coordinator.attach: the interface of a coordinator through the socket of another process."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError, as_completed
from contextlib import closing

import msgpack
import pytest
import zmq

from coremill.config.errors import ConfigError, EngineClosedError, EngineError, RequestError
from coremill.coordinator import AsyncCoordinator, Coordinator, Retry
from coremill.coordinator.attach import VERSION
from coremill.coordinator.local_socket import LocalClient, running
from coremill.coordinator.local_socket.wire import MAX_FRAME_BYTES

WAIT = 60


def wait_until(condition) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_does_what_a_coordinator_does(resident, attach, coordinator):
    there, here = resident(), coordinator(fake=True, ctx=400)
    c = attach(there.address)
    assert c.wait_ready(WAIT)
    asked = {"prompt_ids": [5, 6], "max_tokens": 30, "custom_id": "x", "metadata": {"a": "b"}, "stop": ["dd"]}
    job, same = c.submit(**asked), here.submit(**asked).result(WAIT)
    result = job.result(WAIT)
    assert not job.kept and (result.text, result.token_ids, result.usage) == (same.text, same.token_ids, same.usage)
    assert (result.custom_id, result.metadata) == ("x", {"a": "b"})
    assert c.count_tokens("hello there") == here.count_tokens("hello there")
    chat = [{"role": "user", "content": "hello"}]
    assert c.apply_template(chat) == here.apply_template(chat)
    assert c.count_tokens(messages=chat) == here.count_tokens(messages=chat)
    assert c.apply_template(chat, add_generation_prompt=False) == here.apply_template(chat, add_generation_prompt=False)
    rows = ["a", {"prompt": "b", "max_tokens": 3}, {"prompt": "c", "model": "default"}]
    assert [r.text for r in c.map(rows, max_tokens=5)] == [r.text for r in here.map(rows, max_tokens=5)]
    with pytest.raises(RequestError, match="'max_tokens' is 0"):
        c.submit("a", max_tokens=0)
    with pytest.raises(RequestError, match="context has 400"):
        c.submit("a", max_tokens=500).result(WAIT)
    with pytest.raises(RequestError, match="deadline"):
        c.submit("a", max_tokens=300, timeout=1e-9).result(WAIT)
    assert c.drain(WAIT)
    stats = c.stats()
    assert stats["workers"][0]["pid"] and stats["queue"]["kept"]["done"] == 0
    c.workers(1)
    with pytest.raises(RequestError, match="'count' is 2"):
        c.workers(2)
    c.close()
    with pytest.raises(EngineClosedError):
        c.submit("a")
    assert attach(there.address).submit("a", max_tokens=1).result(WAIT)


def test_text_as_it_comes(resident, attach, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.005")
    c, other = attach((there := resident()).address), attach(there.address)
    job = c.submit(prompt_ids=[9], max_tokens=60, id="a", seed=3)
    pieces = iter(job)
    begun = next(pieces)
    late, elsewhere = c.job("a"), other.job("a")
    texts = ["".join(late), "".join(elsewhere), begun + "".join(pieces)]
    assert set(texts) == {job.result(WAIT).text}
    mine = c.submit(prompt_ids=[9], max_tokens=60, seed=4)  # not kept
    assert "".join(mine) == mine.result(WAIT).text


def test_ids_and_readers_across_clients(resident, attach):
    there = resident()
    one, two = attach(there.address), attach(there.address)
    first = one.submit(prompt_ids=[5], max_tokens=4, id="a")
    assert two.submit(prompt_ids=[5], max_tokens=4, id="a").result(WAIT) == first.result(WAIT)
    assert two.job("a").result(WAIT) == first.result(WAIT)
    with pytest.raises(RequestError, match="another request"):
        two.submit(prompt_ids=[6], max_tokens=4, id="a")
    with pytest.raises(RequestError, match="no job 'b'"):
        two.job("b")
    one.submit_all([{"id": f"more-{n}", "prompt": [n + 1], "max_tokens": 2} for n in range(50)])
    read, readers = [], [two.results(timeout=0.2), attach(there.address).results(timeout=0.2)]

    def read_all(results) -> None:
        for job in results:
            read.append((job.id, job.result(0).text))
            job.acknowledge()

    threads = [threading.Thread(target=read_all, args=(results,)) for results in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    one.drain(WAIT)
    read_all(one.results(timeout=0.2))
    assert sorted(id for id, _ in read) == sorted(["a", *(f"more-{n}" for n in range(50))])
    assert one.stats()["queue"]["kept"] == {"waiting": 0, "begun": 0, "done": 0}
    with pytest.raises(RequestError, match="acknowledged or cancelled"):
        one.submit(prompt_ids=[5], max_tokens=4, id="a")
    with pytest.raises(RequestError, match="not kept"):
        one.submit("x", max_tokens=1).acknowledge()


def test_a_damaged_row_is_told_and_passed_over(host, attach, tmp_path):
    file = tmp_path / "jobs.sqlite"
    there = host(file)
    c = attach(there.address)
    c.submit_all([{"id": id, "prompt": [5], "max_tokens": 1} for id in "abc"])
    c.drain(WAIT)
    c.close()
    there.kill()
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("UPDATE jobs SET request = 'x' WHERE id = 'a'")
        db.execute("UPDATE jobs SET outcome = '{}' WHERE id = 'b'")
    c = attach(host(file).address)
    results = c.results(timeout=WAIT)
    for id in "ab":
        with pytest.raises(RequestError, match=f"job '{id}' cannot be read"):
            next(results)
        with pytest.raises(RequestError, match=f"job '{id}' cannot be read"):
            c.job(id).result(WAIT)
    assert next(results).id == "c"


def test_cancel(resident, attach, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.02")
    c = attach((there := resident(max_active=1)).address)
    jobs = [c.submit(prompt_ids=[n], max_tokens=390, id=f"id-{n}" if n % 2 else None) for n in range(1, 5)]
    follower = attach(there.address).job("id-1")
    for job in jobs:
        assert job.cancel()
        with pytest.raises(CancelledError):
            job.result(WAIT)
    with pytest.raises(RequestError, match="'id-1' was cancelled"):
        follower.result(WAIT)
    wait_until(lambda: there.backend.local.engine.stats(measure=False)["queue"]["running"] == 0)
    assert c.submit(prompt_ids=[5], max_tokens=1).result(WAIT)


def test_many_clients_and_threads(resident, attach):
    there = resident(max_active=32)
    expected = {
        n: attach(there.address).submit(prompt_ids=[n], max_tokens=5, seed=n).result(WAIT).token_ids
        for n in range(1, 9)
    }
    clients = [attach(there.address) for _ in range(4)]
    wrong = []

    def ask(c) -> None:
        jobs = {c.submit(prompt_ids=[n], max_tokens=5, seed=n): n for n in range(1, 9)}
        wrong.extend(jobs[job] for job in as_completed(jobs, WAIT) if job.result().token_ids != expected[jobs[job]])

    threads = [threading.Thread(target=ask, args=(c,)) for c in clients * 8]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_callback_may_submit_and_must_not_wait_for_itself(resident, attach, monkeypatch, tmp_path):
    hold = tmp_path / "hold"
    monkeypatch.setenv("FAKE_HOLD_FILE", str(hold))
    c = attach(resident().address)
    ended: list[str] = []

    def again(job) -> None:
        ended.append(job.id)
        if len(ended) < 10:
            c.submit(prompt_ids=[5], max_tokens=1, id=f"id-{len(ended)}").add_done_callback(again)

    c.submit(prompt_ids=[5], max_tokens=1, id="id-0").add_done_callback(again)
    wait_until(lambda: len(ended) == 10)
    errors = []

    def drain(job) -> None:
        try:
            c.drain()
        except EngineError as error:
            errors.append(str(error))

    hold.touch()
    c.submit(prompt_ids=[5], max_tokens=1).add_done_callback(drain)
    hold.unlink()
    wait_until(lambda: errors)
    assert "callback" in errors[0]


def test_requests_beyond_one_message(resident, attach):
    c = attach(resident(ctx=64).address)
    text = "x" * (MAX_FRAME_BYTES // 3)
    jobs = c.submit_all([{"prompt": text, "id": f"id-{n}", "max_tokens": 1} for n in range(4)])  # more than one frame
    for job in jobs:
        assert isinstance(job.exception(WAIT), RequestError)  # too long for the model
    with pytest.raises(RequestError, match=f"at most {MAX_FRAME_BYTES}"):
        c.submit("x" * MAX_FRAME_BYTES, max_tokens=1)
    assert c.submit("a", max_tokens=1).result(WAIT)
    assert c.stats()["queue"]["unfinished"] == 0


def test_under_asyncio(resident):
    address = resident().address

    async def main() -> None:
        async with AsyncCoordinator.attach(address) as c:
            job = await c.submit(prompt_ids=[5], max_tokens=5, id="a")
            assert "".join([piece async for piece in job]) == (await job).text
            assert await (await c.job("a")) == await job
            async for result in c.results(timeout=0):
                await c.acknowledge(result)
            await c.drain()

    asyncio.run(main())


def test_no_loop_waits_for_the_other_process(attach, resident, monkeypatch):
    c = attach(resident().address)
    on = []

    def seen(call):
        return lambda *args: (on.append((call.__name__, threading.current_thread())), call(*args))[1]

    monkeypatch.setattr(c._backend, "begin", seen(c._backend.begin))
    monkeypatch.setattr(c, "workers", seen(c.workers))

    async def rows():
        for n in range(3):
            yield f"text {n}"

    async def main() -> None:
        asynchronous = AsyncCoordinator.over(c)
        await (await asynchronous.submit(prompt_ids=[5], max_tokens=1))
        tries = Counter()

        def hook(result):
            tries[result.index] += 1
            if tries[result.index] == 1:
                raise Retry("once more")

        assert len([result async for result in asynchronous.map(rows(), hook=hook, max_tokens=1)]) == 3
        await asynchronous.workers(1)

    asyncio.run(main())
    assert Counter(name for name, _ in on) == {"begin": 7, "workers": 1}
    assert threading.main_thread() not in [thread for _, thread in on]


# ---- finding it ----


def test_the_one_that_runs_is_found(resident, attach):
    mine = {"pid": os.getpid(), "kind": "up"}
    others = [r for r in running() if r.kind == "up" and r.pid != os.getpid()]
    if not others:
        with pytest.raises(ConfigError, match="no coordinator to attach to: start one with `coremill up"):
            attach()
    one = resident()
    (record,) = [r for r in running() if r.pid == mine["pid"]]
    assert (record.kind, record.address) == ("up", one.address)
    if not others:
        assert attach().submit("a", max_tokens=1).result(WAIT)
    resident()
    with pytest.raises(ConfigError, match=r"coordinators to attach to, give the address of one: .*ipc://"):
        attach()


def test_addresses_that_cannot_be(resident, attach, tmp_path):
    for wrong in (5, "", "nowhere", "ipc://relative", "tcp://x"):
        with pytest.raises(ConfigError, match="address"):
            attach(wrong)
    with pytest.raises(ConfigError, match="needs keys"):
        attach("tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="keys are for tcp"):
        attach(resident().address, keys=tmp_path)
    with pytest.raises(EngineClosedError, match="nobody listens"):
        attach(f"ipc://{tmp_path}/s")


# ---- what disturbs nobody ----


def test_calls_out_of_turn_and_wrong_ones(resident, attach):
    there = resident()
    good = attach(there.address)
    with LocalClient(there.address) as raw:
        with pytest.raises(RequestError, match="first call must be 'hello'"):
            raw.call("submit", {"jobs": []}, WAIT)
        with pytest.raises(EngineError, match=f"clients of version {VERSION}, not 99"):
            raw.call("hello", {"version": 99}, WAIT)
        raw.call("hello", {"version": VERSION}, WAIT)
        request = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a"}}
        options = {"priority": 0, "deadline": None, "retries": 0, "attempt": 0}
        job = {"id": "x", "kept": True, "watched": False, "request": request, "options": options}
        wrong = [
            ("submit", {}), ("submit", {"jobs": 5}), ("submit", {"jobs": [5]}), ("submit", {"jobs": [{}]}),
            *(("submit", {"jobs": [{**job, name: value}]}) for name in job for value in (None, 5, [], "", {"a": 1})
              if (name, value) != ("id", "x")),
            ("submit", {"jobs": [{**job, "request": {**request, "body": {"prompt": [[1]]}}}]}),
            ("submit", {"jobs": [{**job, "options": {**options, "priority": 1 << 40}}]}),
            ("job", {}), ("job", {"id": "nobody"}), ("watch", {"id": 5}), ("cancel_job", {}),
            ("acknowledge", {"ids": [5]}),
            ("acknowledge", {"ids": ["nobody"]}), ("claim", {"reader": "a", "limit": 0}), ("claim", {"limit": 5}),
            ("unclaim", {"reader": 1}), ("release", {}), ("count", {"requests": [5]}), ("count", {}),
            ("count", {"requests": [request], "add_generation_prompt": 1}), ("workers", {"count": 0}),
            ("glance", {"rows": -1}),
        ]  # fmt: skip
        for kind, fields in wrong:
            with pytest.raises(RequestError):
                raw.call(kind, fields, WAIT)
        for kind, fields in (
            ("watch", {"id": "nobody"}),
            ("unclaim", {"reader": "nobody"}),
            ("release", {"reader": "b"}),
        ):
            assert raw.call(kind, fields, WAIT) is None
        first = raw.start("news")
        with pytest.raises(RequestError, match="asked for already"):
            raw.call("news", {}, WAIT)
        asked = raw.start("claim", {"reader": "a", "limit": 1})
        with pytest.raises(RequestError, match="has a claim already"):
            raw.call("claim", {"reader": "a", "limit": 1}, WAIT)
        assert raw.call("submit", {"jobs": [job]}, WAIT) == [True]
        (news,) = first.result(WAIT)
        assert news[0] == "x" and news[3]["outcome"]["text"]
        assert [claimed["id"] for claimed in asked.result(WAIT)] == ["x"]
        assert raw.call("glance", {"rows": 5}, WAIT)["kind"] == "up"
    assert good.submit("a", max_tokens=1).result(WAIT)
    with good.results(timeout=WAIT) as results:
        assert next(results).id == "x"  # the one it had been given to has left


def test_garbage_and_huge_frames(resident, attach):
    there = resident()
    c = attach(there.address)
    job = c.submit(prompt_ids=[5], max_tokens=300)
    context = zmq.Context()
    strangers = [context.socket(zmq.DEALER) for _ in range(5)]
    for stranger in strangers:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(there.address)
        stranger.send(msgpack.packb([1, "hello", {"version": VERSION}]))
        stranger.send(msgpack.packb([2, "news", {}]))
        for frames in ([b""], [b"\xc1"], [b"a"] * 100, [os.urandom(10_000)], [b"\x91" * 5000]):
            stranger.send_multipart(frames)
        stranger.send(b"x" * (MAX_FRAME_BYTES + 1))
    assert job.result(WAIT).token_ids
    assert all(c.submit(prompt_ids=[n], max_tokens=2).result(WAIT) for n in range(1, 20))
    for stranger in strangers:
        stranger.close()
    context.term()
    wait_until(lambda: there.stats()["clients"] == 1)


# ---- ends ----


def test_the_end_of_the_coordinator(host, attach):
    there = host(FAKE_STEP_SECONDS="0.05")
    c = attach(there.address)
    jobs = [c.submit(prompt_ids=[5], max_tokens=300, id=id) for id in ("a", None)]
    errors = []

    def read() -> None:
        with pytest.raises(EngineClosedError) as caught:
            next(c.results())
        errors.append(caught.value)

    reader = threading.Thread(target=read)
    reader.start()
    there.kill()
    for job in jobs:
        assert isinstance(job.exception(WAIT), EngineClosedError)
    reader.join(WAIT)
    assert len(errors) == 1
    for call in (c.stats, lambda: c.submit("a"), lambda: c.job("a"), lambda: c.count_tokens("a"), lambda: c.drain()):
        try:
            call()
        except EngineClosedError:
            continue
        assert call.__code__.co_names[-1] == "drain"  # there is nothing to wait for


PRODUCER = """
import sys
from coremill.coordinator import Coordinator
with Coordinator.attach(sys.argv[1]) as c:
    for n in range(10):
        c.submit(prompt_ids=[n + 1], max_tokens=20, id=f"id-{n}")
    unnamed = [c.submit(prompt_ids=[n + 1], max_tokens=390) for n in range(3)]
    print("submitted", flush=True)
    sys.stdin.read()
    unnamed[0].result()
"""


@pytest.mark.parametrize("durable", [False, True])
def test_a_killed_client_comes_back_to_its_jobs(host, attach, client, tmp_path, durable):
    there = host(tmp_path / "jobs.sqlite" if durable else "", FAKE_STEP_SECONDS="0.01")
    producer = client(PRODUCER, there.address)
    assert producer.stdout.readline() == "submitted\n"
    producer.kill()
    producer.wait()
    c = attach(there.address)
    assert [c.job(f"id-{n}").result(WAIT).usage.prompt_tokens for n in range(10)] == [1] * 10
    # Without --queue nobody can ask for the unnamed ones any more: they are cancelled. With it they are kept, too.
    wait_until(lambda: c.stats()["queue"]["running"] + c.stats()["queue"]["waiting"] == 0)
    assert c.stats()["queue"]["kept"]["done"] == (13 if durable else 10)


def test_a_client_may_be_stopped_for_long(host, attach, client):
    import signal

    there = host()
    producer = client(PRODUCER.replace("sys.stdin.read()", "pass"), there.address)
    assert producer.stdout.readline() == "submitted\n"
    producer.send_signal(signal.SIGSTOP)
    c = attach(there.address)
    assert all(c.job(f"id-{n}").result(WAIT) for n in range(10))
    producer.send_signal(signal.SIGCONT)
    assert producer.wait(WAIT) == 0


def test_a_durable_queue_outlives_the_coordinator(host, attach, tmp_path):
    queue = tmp_path / "jobs.sqlite"
    first = host(queue, FAKE_STEP_SECONDS="0.01")
    c = attach(first.address)
    c.submit_all([{"id": f"id-{n}", "prompt": [n + 1], "max_tokens": 30} for n in range(20)])
    assert c.job("id-0").result(WAIT)
    first.kill()
    c = attach(host(queue).address)
    jobs = {f"id-{n}": c.job(f"id-{n}").result(WAIT).text for n in range(20)}
    assert {job.id: job.result(0).text for job in c.results(timeout=0)} == jobs


def test_a_forked_child_is_told(resident, attach):
    c = attach(resident().address)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            c.submit("a")
        except EngineError:
            c.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert c.submit("a", max_tokens=1).result(WAIT)


def test_dropped_without_close_detaches(resident, attach):
    import gc

    there = resident()
    c = Coordinator.attach(there.address)
    job = c.submit(prompt_ids=[5], max_tokens=5)
    del c
    assert job.result(WAIT)
    del job
    gc.collect()
    wait_until(lambda: there.stats()["clients"] == 0)
