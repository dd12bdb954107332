"""The coordinator under asyncio: nothing blocks the loop, and cancelled tasks cancel their jobs."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from concurrent.futures import CancelledError

import pytest

from coremill.config.errors import ConfigError, EngineClosedError, EngineError, QueueFullError, RequestError
from coremill.coordinator import AsyncCoordinator, Coordinator, Failure, Reject, Retry


@pytest.fixture(scope="module")
def blocking(tiny_pack):
    with Coordinator(tiny_pack, ctx=400) as coordinator:
        yield coordinator
        assert coordinator.drain(60)


@pytest.fixture
def shared(blocking):
    """A new loop in each test, one coordinator beneath."""
    return AsyncCoordinator.over(blocking)


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def test_jobs_are_awaited_gathered_and_iterated(shared, blocking):
    async def main():
        job = await shared.submit("a b c", max_tokens=30, seed=3)
        pieces = [piece async for piece in job]
        assert "".join(pieces) == (await job).text and len(pieces) > 1
        assert "".join([piece async for piece in job]) == "".join(pieces)  # again, when it is done
        jobs = [await shared.submit("a b c", max_tokens=5, seed=n) for n in range(20)]
        results = await asyncio.gather(*jobs)
        assert await asyncio.wait_for(jobs[0], 60) == results[0]
        return [result.token_ids for result in results]

    found = asyncio.run(main())
    assert found == [blocking.submit("a b c", max_tokens=5, seed=n).result(60).token_ids for n in range(20)]


def test_errors_are_raised_where_they_are_awaited(shared):
    async def main():
        with pytest.raises(RequestError, match="temperature"):
            await shared.submit("a", temperature=9)
        job = await shared.submit("xq" * 400)
        with pytest.raises(RequestError, match="context"):
            await job
        with pytest.raises(RequestError, match="context"):
            async for _ in job:
                pass

    asyncio.run(main())


def test_a_cancelled_task_cancels_its_job(shared, blocking):
    async def read(job):
        async for _ in job:
            pass

    async def main():
        for how in ("await", "wait_for", "cancel"):
            job = await shared.submit("a", max_tokens=390)
            if how == "wait_for":
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(job, 0.01)
            elif how == "await":
                task = asyncio.ensure_future(job)
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                reader = asyncio.create_task(read(job))
                await until(lambda: job.watched)  # noqa: B023
                job.cancel()
                with pytest.raises(CancelledError):
                    await reader
            await until(job.cancelled)
        await shared.drain()
        assert blocking._roster.num_unfinished == 0

    asyncio.run(main())


def test_a_full_queue_keeps_the_task_waiting_not_the_loop(tiny_pack):
    async def main():
        async with AsyncCoordinator(tiny_pack, ctx=400, max_queue=2) as full:
            jobs = [await full.submit("a", max_tokens=390, seed=n) for n in range(2)]
            with pytest.raises(QueueFullError, match="max_queue is 2"):
                await full.submit("b", wait=False)
            with pytest.raises(QueueFullError, match=r"after 0\.01 s"):
                await full.submit("b", wait=0.01)
            waiting = [asyncio.create_task(full.submit("b", max_tokens=2)) for _ in range(6)]
            await asyncio.sleep(0.01)
            gone = waiting.pop(0)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            for job in jobs:
                job.cancel()
            for job in await asyncio.gather(*waiting):
                assert (await job).token_ids
            await full.drain()
            assert (await full.stats())["queue"]["unfinished"] == 0
            for _ in range(3):  # no place is lost
                assert await (await full.submit("b", max_tokens=1, wait=False))

    asyncio.run(main())


def test_map_over_any_input(shared, blocking):
    rows = [f"row {number}" for number in range(40)]

    async def slowly():
        for row in rows:
            await asyncio.sleep(0)
            yield row

    async def main():
        expected = [result.text for result in blocking.map(rows, max_tokens=4)]
        for ordered, make in itertools.product((True, False), (slowly, lambda: rows, lambda: iter(rows))):
            results = [result async for result in shared.map(make(), max_tokens=4, ordered=ordered, window=7)]
            assert sorted(result.index for result in results) == [*range(40)]
            assert all(result.text == expected[result.index] for result in results)
            assert not ordered or [result.text for result in results] == expected

    asyncio.run(main())


def test_the_window_holds_an_async_input_back(shared):
    taken = 0

    async def endless():
        nonlocal taken
        while True:
            taken += 1
            yield {"prompt": [5 + taken % 30]}

    async def main():
        async with shared.map(endless(), max_tokens=1, window=15) as results:
            most = 0
            for given in range(200):
                assert (await anext(results)).index == given
                most = max(most, taken - given)
            assert most <= 16

    asyncio.run(main())
    assert taken <= 216


def test_hooks_of_both_kinds(shared):
    tries: list[int] = []

    async def hook(result):
        await asyncio.sleep(0)
        tries.append(result.index)
        if result.index == 1:
            raise Reject("no")
        if result.index == 2 and tries.count(2) < 2:
            raise Retry("again")
        if result.index == 3:
            raise ZeroDivisionError
        return result.text.upper()

    async def main():
        results = shared.map(["a"] * 5, max_tokens=3, hook=hook, errors="return")
        seen = []
        while True:
            try:
                outcome = await anext(results)
                seen.append("rejected" if isinstance(outcome, Failure) else outcome.value == outcome.text.upper())
            except ZeroDivisionError:
                seen.append("raised")
            except StopAsyncIteration:
                break
        assert seen == [True, "rejected", True, "raised", True]
        assert [r.value async for r in shared.map(["a"], max_tokens=1, hook=lambda result: 7)] == [7]

    asyncio.run(main())
    assert tries.count(2) == 2


def test_what_an_async_input_raises_comes_after_its_rows(shared):
    async def rows():
        for number in range(10):
            yield f"row {number}"
        raise ValueError("the input")

    async def main():
        seen = []
        with pytest.raises(ValueError, match="the input"):
            async for result in shared.map(rows(), max_tokens=2):
                seen.append(result.index)
        assert seen == [*range(10)]

    asyncio.run(main())


def test_a_map_that_is_given_up_stops(shared, blocking):
    ended = []

    async def endless():
        try:
            while True:
                yield "a"
        finally:
            ended.append(True)

    async def main():
        async with shared.map(endless(), max_tokens=300, window=20) as results:
            assert (await anext(results)).index == 0
        await until(lambda: blocking._roster.num_unfinished == 0)
        task = asyncio.create_task(anext(shared.map(itertools.repeat("a"), max_tokens=390, window=20)))
        await until(lambda: blocking._roster.num_unfinished == 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        await until(lambda: blocking._roster.num_unfinished == 0)  # nobody has its results any more
        assert (await (await shared.submit("a", max_tokens=2))).token_ids

    asyncio.run(main())
    assert ended


def test_many_loops_in_many_threads(blocking):
    shared, found = AsyncCoordinator.over(blocking), []

    async def main(number):
        jobs = [await shared.submit("a b c", max_tokens=4, seed=n) for n in range(5)]
        results = [await job for job in jobs]
        mapped = [r.text async for r in shared.map(["x", "y"], max_tokens=2)]
        found.append(([result.text for result in results], mapped))

    threads = [threading.Thread(target=lambda n=n: asyncio.run(main(n))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 8 and all(each == found[0] for each in found)


def test_the_loop_is_never_blocked(shared):
    """Ticks of the loop go on while each of these waits for workers or the helper."""

    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        messages = [{"role": "user", "content": "hello"}]
        calls = (
            lambda: shared.count_tokens("a b c"),
            lambda: shared.apply_template(messages),
            shared.stats,
            lambda: shared.wait_ready(60),
            shared.drain,
        )
        for call in calls:
            before = ticks
            assert await call() is not False
            assert ticks > before
        job = await shared.submit("a", max_tokens=100)
        before = ticks
        await job
        assert ticks > before
        ticking.cancel()

    asyncio.run(main())


def test_starting_and_closing(tiny_pack):
    async def main():
        coordinator = AsyncCoordinator(tiny_pack, ctx=400, workers=1)
        with pytest.raises(EngineError, match="not been started"):
            await coordinator.submit("a")
        assert await coordinator.start() is coordinator
        await coordinator.workers(1)
        job = await coordinator.submit("a", max_tokens=390)
        pieces = aiter(job)
        await anext(pieces)
        await asyncio.gather(coordinator.close(), coordinator.close())
        with pytest.raises(EngineClosedError):
            async for _ in pieces:
                pass
        with pytest.raises(EngineClosedError):
            await coordinator.submit("a")
        with pytest.raises(ConfigError):
            async with AsyncCoordinator(tiny_pack, max_active=0):
                pass

    asyncio.run(main())


def test_a_loop_that_ends_leaves_jobs_and_readers_behind(shared, blocking):
    async def main():
        job = await shared.submit("a", max_tokens=200)
        reader = aiter(job)
        await anext(reader)
        return job, reader

    job, reader = asyncio.run(main())
    assert job.result(60).token_ids
    del reader
    end = time.monotonic() + 60
    while blocking._roster.num_unfinished and time.monotonic() < end:
        time.sleep(0.002)
    assert blocking.submit("a", max_tokens=1).result(60)
