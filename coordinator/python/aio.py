"""The coordinator under asyncio: the same jobs and results, awaited."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from coremill.config.errors import EngineError
from coremill.coordinator.python.feeders import feed_by_task, feed_by_thread
from coremill.coordinator.python.flow import Errors
from coremill.coordinator.python.frames import FrameErrors, FrameMap, FrameT, text_of
from coremill.coordinator.python.job import Job
from coremill.coordinator.python.results import AsyncResults, Hook, enter
from coremill.coordinator.python.sync import Coordinator
from coremill.coordinator.python.wake import answer_of, done_on_thread

if TYPE_CHECKING:
    import datetime


class AsyncCoordinator:
    """A Coordinator for programs with an event loop; nothing here blocks the loop.

        async with AsyncCoordinator("smollm2") as c:
            job = await c.submit("The capital of France is", max_tokens=20)
            async for piece in job:
                print(piece, end="")
            print((await job).usage)

    Args: as of Coordinator. It starts with the `async with` block or await start(), and may be used from any number
    of loops and threads. `blocking` is the Coordinator beneath, for the threads of the same program.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        max_queue: int | None = None,
        queue: str | os.PathLike[str] | None = None,
        keep: float | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        **options: Any,
    ) -> None:
        self._make = lambda: Coordinator(
            model, max_queue=max_queue, queue=queue, keep=keep, on_event=on_event, **options
        )
        self._blocking: Coordinator | None = None

    @classmethod
    def attach(
        cls,
        address: str | None = None,
        *,
        keys: str | os.PathLike[str] | None = None,
        max_queue: int | None = None,
    ) -> AsyncCoordinator:
        """As Coordinator.attach, done by the `async with` block or await start()."""
        made = cls.__new__(cls)
        made._make = lambda: Coordinator.attach(address, keys=keys, max_queue=max_queue)
        made._blocking = None
        return made

    @classmethod
    def over(cls, coordinator: Coordinator) -> AsyncCoordinator:
        """One that shares a Coordinator, and closes it when it is closed."""
        made = cls.__new__(cls)
        made._make = lambda: coordinator
        made._blocking = coordinator
        return made

    async def start(self) -> AsyncCoordinator:
        """Start the workers, which load while you go on. ConfigError, ModelError, ... as Coordinator."""
        if self._blocking is None:
            self._blocking = await asyncio.to_thread(self._make)  # packs the model, when it is used first
        return self

    @property
    def blocking(self) -> Coordinator:
        if self._blocking is None:
            raise EngineError("this coordinator has not been started: use `async with`, or await start()")
        return self._blocking

    # ---- jobs ----

    async def submit(
        self,
        prompt: str | None = None,
        *,
        messages: Iterable[Mapping[str, Any]] | None = None,
        prompt_ids: Iterable[int] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: str | Iterable[str] | None = None,
        allow_special: bool = False,
        id: str | None = None,
        custom_id: str | None = None,
        metadata: Mapping[str, str] | None = None,
        priority: int = 0,
        timeout: float | None = None,
        deadline: float | datetime.datetime | None = None,
        retries: int = 0,
        wait: bool | float = True,
    ) -> Job:
        """As Coordinator.submit; while the queue is full the task waits, unless `wait` says otherwise.

        A Job can be awaited (`await job`, asyncio.gather, wait_for) and iterated (`async for piece in job`). Cancelling
        the task that awaits it cancels the job.
        """
        coordinator = self.blocking
        coordinator._check_owner()
        given = {
            "prompt": prompt, "messages": messages, "prompt_ids": prompt_ids, "max_tokens": max_tokens,
            "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed, "stop": stop,
            "allow_special": allow_special, "metadata": metadata,
        }  # fmt: skip
        options = {"priority": priority, "timeout": timeout, "deadline": deadline, "retries": retries}
        kept = coordinator._is_kept(id)
        request, checked = coordinator._checked(given, options, id if custom_id is None else custom_id)
        await enter(coordinator._roster, wait)
        begin = partial(coordinator._begin, request, checked, id, kept)
        if not (kept or coordinator._backend.begin_waits):
            return begin()
        # When this task is cancelled, nobody will know a job that has no id of the caller's.
        return await done_on_thread(begin, unwanted=Job.cancel if id is None else None)

    def map(
        self,
        rows: Iterable[Any] | AsyncIterable[Any],
        *,
        ordered: bool = True,
        window: int | None = None,
        hook: Hook | None = None,
        retries: int = 2,
        errors: Errors = "raise",
        chat: bool = False,
        system: str | None = None,
        any_model: bool = False,
        **fields: Any,
    ) -> AsyncResults:
        """As Coordinator.map, for `async for`; the hook may be a coroutine function.

            async for result in c.map(rows, ordered=False): ...

        An async iterable is read by a task of this loop, any other iterable on a thread.
        """
        flow = self.blocking._new_flow(rows, ordered, window, retries, errors, any_model, chat, system, fields)
        results = AsyncResults(flow, hook, errors)
        if isinstance(rows, AsyncIterable):
            results.feeder = asyncio.get_running_loop().create_task(feed_by_task(flow, rows))
        else:
            feed_by_thread(flow, rows)
        return results

    # ---- jobs that are kept ----

    async def job(self, id: str) -> Job:
        """As Coordinator.job."""
        return await asyncio.to_thread(self.blocking.job, id)

    async def submit_all(self, rows: Iterable[Any], **fields: Any) -> list[Job]:
        """As Coordinator.submit_all."""
        return await asyncio.to_thread(lambda: self.blocking.submit_all(rows, **fields))

    async def results(self, timeout: float | None = None) -> AsyncIterator[Job]:
        """As Coordinator.results, for `async for`."""
        with self.blocking.results() as results:
            end = None if timeout is None else time.monotonic() + timeout
            while True:
                # In pieces, as a thread that waits cannot be called off.
                left = 1.0 if end is None else max(0.0, min(1.0, end - time.monotonic()))
                if await asyncio.to_thread(results.fetch, left):
                    yield results.take()
                    end = None if timeout is None else time.monotonic() + timeout
                elif end is not None and time.monotonic() >= end:
                    return

    async def acknowledge(self, *jobs: Job | str) -> None:
        """As Coordinator.acknowledge."""
        await asyncio.to_thread(self.blocking.acknowledge, *jobs)

    async def map_frame(
        self,
        frame: FrameT,
        column: Any = None,
        *,
        into: str = "completion",
        details: bool = False,
        errors: FrameErrors = "raise",
        window: int | None = None,
        hook: Hook | None = None,
        retries: int = 2,
        chat: bool = False,
        system: str | None = None,
        **fields: Any,
    ) -> FrameT:
        """As Coordinator.map_frame; the hook may be a coroutine function."""
        frames = FrameMap(frame, column, into, errors, details)
        hook = hook or text_of
        async with self.map(
            frames.rows(), ordered=False, window=window, hook=hook, retries=retries, errors="return", chat=chat,
            system=system, **fields,
        ) as results:  # fmt: skip
            async for outcome in results:
                frames.take(outcome)
        return frames.frame()

    def cancel_all(self) -> None:
        """Cancel every unfinished job."""
        self.blocking.cancel_all()

    async def drain(self) -> None:
        """Wait until no job is unfinished."""
        self.blocking._check_owner()
        await answer_of(self.blocking._roster.idle())
        await answer_of(self.blocking._backend.idle())

    # ---- text ----

    async def count_tokens(
        self, prompt: str | None = None, *, messages: Iterable[Mapping[str, Any]] | None = None
    ) -> int:
        """As Coordinator.count_tokens."""
        return await asyncio.to_thread(lambda: self.blocking.count_tokens(prompt, messages=messages))

    async def apply_template(self, messages: Iterable[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """As Coordinator.apply_template."""
        return await asyncio.to_thread(
            lambda: self.blocking.apply_template(messages, add_generation_prompt=add_generation_prompt)
        )

    # ---- the whole ----

    async def stats(self) -> dict[str, Any]:
        """As Coordinator.stats."""
        return await asyncio.to_thread(self.blocking.stats)

    async def workers(self, count: int) -> None:
        """As Coordinator.workers."""
        await asyncio.to_thread(self.blocking.workers, count)

    async def wait_ready(self, timeout: float | None = None) -> bool:
        """As Coordinator.wait_ready."""
        return await asyncio.to_thread(self.blocking.wait_ready, timeout)

    async def close(self) -> None:
        """As Coordinator.close."""
        if self._blocking is not None:
            await asyncio.to_thread(self._blocking.close)

    async def __aenter__(self) -> AsyncCoordinator:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
