"""Threads and event loops that wait for the same things."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Wake:
    """An asyncio.Event that any thread may set, by calling it. For the loop that it is made in."""

    def __init__(self) -> None:
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()

    def __call__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        """Until it has been set since the last clear()."""
        await self._event.wait()

    def clear(self) -> None:
        self._event.clear()


async def answer_of(asked: Future[T]) -> T:
    """The result of a future that threads set, which nobody wants any more when the task is cancelled."""
    return await asyncio.wrap_future(asked)


async def done_on_thread(call: Callable[[], T], unwanted: Callable[[T], Any] | None = None) -> T:
    """call(), which may wait, on a thread. It is done to its end also when the task is cancelled; its result then goes
    to `unwanted`."""
    result = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:

        def ended(result: asyncio.Future[T]) -> None:
            if not result.cancelled() and result.exception() is None and unwanted is not None:
                unwanted(result.result())

        result.add_done_callback(ended)
        raise
