"""Snapshots of a coordinator as they come, and what it is asked to do, on a thread of their own: whoever draws never
waits for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from coremill.config.errors import CoremillError, EngineClosedError, EngineError
from coremill.config.printable import printable
from coremill.coordinator.local_socket import LocalClient
from coremill.coordinator.view.ceiling import load_ceiling
from coremill.coordinator.view.machine import MachineWatch
from coremill.coordinator.view.rates import History

# A coordinator that does not answer for so long is said to be silent, in seconds.
ANSWER_SECONDS = 5.0
# Between the two looks that the rates of a single table come from, in seconds.
_ONCE_SECONDS = 2.0


class Feed:
    """A connection to one coordinator.

    interval: seconds between looks. Errors of the constructor: ConfigError for an address that can be none of this
    user's, EngineClosedError when nobody is there.
    """

    def __init__(self, address: str, interval: float) -> None:
        self._client = LocalClient(address)
        self.interval = interval
        self.history = History(MachineWatch(), load_ceiling())

    def look(self, rows: int) -> None:
        """Take a snapshot into `history`. EngineClosedError when the coordinator has ended; TimeoutError."""
        self.history.add(self._client.call("glance", {"rows": rows}, ANSWER_SECONDS))

    def ask(self, kind: str, fields: dict[str, Any]) -> Future:
        """pause, workers or cancel (coordinator/view/handlers.py), without waiting."""
        return self._client.start(kind, fields)

    def views(self, rows: int, once: bool) -> Iterator[dict[str, Any]]:
        """Views with rates: one, or one per interval until the coordinator ends. EngineError when it is silent."""
        try:
            self.look(rows)
            while True:
                time.sleep(_ONCE_SECONDS if once else self.interval)
                self.look(rows)
                yield self.history.view()
                if once:
                    return
        except EngineClosedError:
            if once:
                raise
        except TimeoutError as error:
            raise EngineError(str(error)) from None

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Watcher:
    """Looks again and again. `notify` is called, on the thread, when there is something new.

    Attributes:
        rows: most rows of each worker to ask for. view: of the last look; None before the first.
        problem: why there is no newer one, in words. ended: the coordinator is gone.
    """

    def __init__(self, feed: Feed, notify: Callable[[], None]) -> None:
        self.view: dict[str, Any] | None = None
        self.problem: str | None = None
        self.ended = False
        self.rows = 16
        self._feed, self._notify = feed, notify
        self._hurry: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: leave
        self._thread = threading.Thread(target=self._run, name="coremill-top", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """Look now."""
        self._hurry.put(True)

    def close(self) -> None:
        """Returns at once; a look that waits for its answer is left alone."""
        self._hurry.put(False)

    def _run(self) -> None:
        while not self.ended:
            begin = time.monotonic()
            try:
                self._feed.look(self.rows)
                self.view = self._feed.history.view()
                self.problem = None
            except TimeoutError:
                self.problem = f"no answer for {ANSWER_SECONDS:g} s: the coordinator hangs, is stopped or very busy"
            except EngineClosedError:
                self.ended = True
            except CoremillError as error:
                self.problem = str(error)
            except Exception as error:  # a bug, or one of the kernel's files: a table that stands still would hide it
                self.problem = printable(f"{type(error).__name__}: {error}")
            self._notify()
            try:
                if not self._hurry.get(timeout=max(0.05, begin + self._feed.interval - time.monotonic())):
                    return
            except queue.Empty:
                pass
