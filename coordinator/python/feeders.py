"""Who takes rows from an input and puts them into a flow: a thread for iterables, a task for async ones.

The input is read only while the window has room, never by two at once, and not by the thread that waits for results:
these come while the input is slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterable, Iterable
from typing import Any

from coremill.config.errors import ConfigError
from coremill.coordinator.python.flow import Flow
from coremill.coordinator.python.results import begin_entry, enter
from coremill.coordinator.python.wake import Wake


def check_rows(rows: Any) -> None:
    """TypeError for what cannot be a sequence of rows, or is one by mistake."""
    if isinstance(rows, (str, bytes, dict)) or not isinstance(rows, (Iterable, AsyncIterable)):
        raise TypeError(f"rows is a {type(rows).__name__}: it must be an iterable or async iterable of rows")


def check_choices(window: Any, errors: Any) -> None:
    """ConfigError for a wrong one."""
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ConfigError(f"window is {window!r}: it must be an integer of at least 1, or None")
    if errors not in ("raise", "return"):
        raise ConfigError(f"errors is {errors!r}: it must be 'raise' or 'return'")


def feed_by_thread(flow: Flow, rows: Iterable[Any] | AsyncIterable[Any]) -> None:
    """Returns at once. An async iterable gets an event loop of its own."""

    def run() -> None:
        if isinstance(rows, AsyncIterable):
            asyncio.run(feed_by_task(flow, rows))
        else:
            _feed(flow, rows)

    threading.Thread(target=run, name="coremill-map", daemon=True).start()


def _feed(flow: Flow, rows: Iterable[Any]) -> None:
    try:
        iterator = iter(rows)
        while True:
            flow.wait_for_room()
            if flow.closed:
                break
            try:
                row = next(iterator)
            except StopIteration:
                break
            entry = flow.take_in(row)
            if entry is None:
                continue
            try:
                flow.coordinator._roster.enter()
            except Exception as error:
                flow.fail(entry, error)
            else:
                flow.begin(entry)
    except BaseException as error:  # raised again where the results are read
        flow.end_input(error)
    else:
        flow.end_input()


async def feed_by_task(flow: Flow, rows: AsyncIterable[Any]) -> None:
    """Until the input ends or the flow is closed, which cancels it."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    news = Wake()

    def heard() -> None:
        news()
        if flow.closed and task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(task.cancel)

    flow.listen(heard)
    try:
        iterator = aiter(rows)
        while True:
            while not flow.has_room:
                news.clear()
                if not flow.has_room:
                    await news.wait()
            if flow.closed:
                break
            try:
                row = await anext(iterator)
            except StopAsyncIteration:
                break
            entry = flow.take_in(row)
            if entry is None:
                continue
            try:
                await enter(flow.coordinator._roster)
            except Exception as error:
                flow.fail(entry, error)
            else:
                await begin_entry(flow, entry)
    except asyncio.CancelledError:
        flow.end_input(None if flow.closed else EOFError("the event loop that read the rows of a map has ended"))
    except BaseException as error:  # raised again where the results are read
        flow.end_input(error)
    else:
        flow.end_input()
    finally:
        flow.unlisten(heard)
