"""What map() gives: an iterator of results, for threads and for event loops."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from coremill.config.errors import RequestError
from coremill.coordinator.python.flow import Entry, Errors, Failure, Flow, Reject, Result, Retry
from coremill.coordinator.python.roster import Roster
from coremill.coordinator.python.wake import Wake, answer_of, done_on_thread

Hook = Callable[[Result], Any]


class _Results:
    def __init__(self, flow: Flow, hook: Hook | None, errors: Errors) -> None:
        self._flow, self._hook, self._errors = flow, hook, errors
        self._close = weakref.finalize(self, flow.close)
        self._close.atexit = False

    def _outcome(self, entry: Entry) -> Result | RequestError:
        """An error that is no fault of the row ends the map."""
        try:
            return self._flow.outcome(entry)
        except BaseException:
            self._close()
            raise

    def _deliver(self, entry: Entry, outcome: Result | RequestError) -> Result | Failure:
        self._flow.settle(entry)
        if isinstance(outcome, Result):
            return outcome
        if self._errors == "raise":
            raise outcome
        return self._flow.failure(entry, outcome)


class Results(_Results, Iterator[Result | Failure]):
    """The results of Coordinator.map(), as they are asked for. Rows under way are cancelled by close(), at the end of
    a `with` block, by Ctrl-C while waiting, and when nobody refers to it any more."""

    def __next__(self) -> Result | Failure:
        self._flow.coordinator._check_owner()
        try:
            return self._next()
        except KeyboardInterrupt:
            self._close()
            raise

    def _next(self) -> Result | Failure:
        while True:
            entry = self._flow.wait()
            if entry is None:
                self._close()
                self._flow.check_input()
                raise StopIteration
            outcome = self._outcome(entry)
            if self._hook is not None and isinstance(outcome, Result):
                try:
                    outcome = replace(outcome, value=self._hook(outcome))
                except (Reject, Retry) as verdict:
                    refusal = self._judge(entry, verdict)
                    if refusal is None:
                        continue
                    outcome = refusal
                except BaseException:
                    self._flow.settle(entry)
                    raise
            return self._deliver(entry, outcome)

    def _judge(self, entry: Entry, verdict: Reject | Retry) -> RequestError | None:
        refusal = self._flow.judge(entry, verdict)
        if refusal is None:
            self._flow.coordinator._roster.enter()
            self._flow.begin(entry)
        return refusal

    def close(self) -> None:
        self._close()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()


class AsyncResults(_Results, AsyncIterator[Result | Failure]):
    """The results of AsyncCoordinator.map(), as they are asked for. Rows under way are cancelled by aclose(), at the
    end of an `async with` block, and when nobody refers to it any more. The hook may be a coroutine function."""

    feeder: asyncio.Task[None] | None = None  # kept here, as loops do not keep their tasks

    async def __anext__(self) -> Result | Failure:
        while True:
            entry = await self._wait()
            if entry is None:
                self._close()
                self._flow.check_input()
                raise StopAsyncIteration
            outcome = self._outcome(entry)
            if self._hook is not None and isinstance(outcome, Result):
                try:
                    value = self._hook(outcome)
                    outcome = replace(outcome, value=await value if inspect.isawaitable(value) else value)
                except (Reject, Retry) as verdict:
                    refusal = await self._judge(entry, verdict)
                    if refusal is None:
                        continue
                    outcome = refusal
                except BaseException:
                    self._flow.settle(entry)
                    raise
            return self._deliver(entry, outcome)

    async def _wait(self) -> Entry | None:
        flow = self._flow
        flow.coordinator._check_owner()
        entry = flow.take()
        if entry is not None or flow.is_done:
            return entry
        news = Wake()
        flow.listen(news)
        try:
            while True:
                news.clear()
                entry = flow.take()
                if entry is not None or flow.is_done:
                    return entry
                await news.wait()
        finally:
            flow.unlisten(news)

    async def _judge(self, entry: Entry, verdict: Reject | Retry) -> RequestError | None:
        refusal = self._flow.judge(entry, verdict)
        if refusal is None:
            await enter(self._flow.coordinator._roster)
            await begin_entry(self._flow, entry)
        return refusal

    async def aclose(self) -> None:
        self._close()

    async def __aenter__(self) -> AsyncResults:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._close()


async def begin_entry(flow: Flow, entry: Entry) -> None:
    """flow.begin(entry), without waiting for another process on this thread."""
    if flow.coordinator._backend.begin_waits:
        await done_on_thread(partial(flow.begin, entry))
    else:
        flow.begin(entry)


async def enter(roster: Roster, wait: bool | float = True) -> None:
    """Take a place of the roster, as Roster.enter does."""
    place = roster.ask()
    if place is None:
        return
    try:
        async with asyncio.timeout(None if wait is True else float(wait)):
            await answer_of(place)
    except TimeoutError:
        roster.decline(place)
        raise roster.full(wait) from None
    except BaseException:
        roster.decline(place)
        raise
