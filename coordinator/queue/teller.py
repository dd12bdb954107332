"""Tells followers how their jobs have ended: on a thread of its own, as what they do then may wait for the queue."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from coremill.coordinator.callbacks import call_back


class Teller:
    """Calls in the order of tell(), until end()."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], None], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="coremill-queue-teller", daemon=True)
        self._thread.start()

    @property
    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def tell(self, call: Callable[[Any], None], outcome: Any) -> None:
        self._calls.put((call, outcome))

    def end(self) -> None:
        """After what has been told so far."""
        self._calls.put(None)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while (told := self._calls.get()) is not None:
            call_back("a follower of a job", *told)
            del told  # keeps nobody's job alive while nothing happens
