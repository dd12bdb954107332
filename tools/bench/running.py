"""An engine of this process under measurement, and sequences under way in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coremill.config.errors import EngineError
from coremill.config.request import SequenceRequest, SequenceResult

if TYPE_CHECKING:
    from typing import Self

# For anything that must end by itself, in seconds.
TIMEOUT = 3600.0


class Started:
    """An engine that runs, with all workers ready, inside the block and is closed behind it. who: its workers, for
    messages."""

    def __init__(self, engine: Any, who: str = "the workers") -> None:
        self.engine, self._who = engine, who

    def __enter__(self) -> Self:
        try:
            self.engine.start()
            if not self.engine.wait_ready(TIMEOUT):
                raise EngineError(f"bench: {self._who} were not ready after {TIMEOUT:.0f} s")
        except BaseException:
            self.engine.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.close()


class Running:
    """Sequences, submitted at once. results: of those that have ended, in the order of their ends."""

    def __init__(self, engine: Any, requests: Sequence[SequenceRequest]) -> None:
        self.results: list[SequenceResult] = []
        self._engine = engine
        self._num = len(requests)
        self._errors: list[str] = []
        self._done = threading.Event()
        self._tickets = [engine.submit(request, self._finished) for request in requests]

    def _finished(self, result: SequenceResult) -> None:
        # Always on the engine's one thread.
        if result.error is not None and result.error.code != "cancelled":
            self._errors.append(str(result.error))
        self.results.append(result)
        if len(self.results) == self._num:
            self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def check(self, deadline: float) -> None:
        """EngineError unless all is well and something still runs."""
        if self._errors:
            raise EngineError(f"bench: a sequence failed: {self._errors[0]}")
        if self.done:
            raise EngineError("bench: every sequence ended before the window did")
        if time.monotonic() > deadline:
            raise EngineError(f"bench: no end after {TIMEOUT:.0f} s")

    def cancel(self) -> None:
        for ticket in self._tickets:
            self._engine.cancel(ticket)

    def wait(self) -> None:
        """Until all have ended. EngineError when one has failed."""
        self._done.wait(TIMEOUT)
        if self._errors or not self.done:
            raise EngineError(f"bench: a sequence failed: {(self._errors or ['no end'])[0]}")
