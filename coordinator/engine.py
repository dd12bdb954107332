"""The thin shell around the scheduler: one thread, one poll, instructions carried out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coremill.config.engine import EngineConfig
from coremill.config.request import SequenceRequest, SequenceResult
from coremill.config.topology import CoreGroup


class Engine:
    """Runs sequences on worker processes, one per core group.

    Every method may be called from any thread. Callbacks run on the engine's own thread and must be quick.
    """

    def __init__(
        self,
        pack_path: str | Path,
        config: EngineConfig,
        groups: Sequence[CoreGroup],
        *,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Start the workers and return at once; sequences may be submitted while they load."""

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until every worker is ready. WorkerStartError when the engine failed instead."""

    def submit(self, request: SequenceRequest, on_done: Callable[[SequenceResult], None]) -> int:
        """Queue one sequence; on_done is called exactly once, also after cancel(), failures and close().

        Returns a ticket for cancel(). EngineClosedError after close(); RequestErrors arrive in the result.
        """
        raise NotImplementedError

    def cancel(self, ticket: int) -> None:
        """Stop a sequence within a step; its result carries RequestError "cancelled"."""

    def stats(self) -> dict[str, Any]:
        """Counts of the queue and `workers`, a list with the names of design.md section 9."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the workers and join everything. Unfinished sequences end with RequestError "engine_closed"."""
