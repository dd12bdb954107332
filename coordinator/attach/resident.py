"""A coordinator that stays: its engine, its queue, and the socket through which everybody reaches it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from coremill.config.engine import EngineConfig
from coremill.coordinator.attach.desk import Desk
from coremill.coordinator.local_socket import LocalServer
from coremill.coordinator.local_socket.keys import ServerKeys
from coremill.coordinator.queue.backend import QueueBackend
from coremill.coordinator.view.handlers import watch_handlers

if TYPE_CHECKING:
    from coremill.native.packer import Progress


class Resident:
    """Everything of `coremill up`, until close().

    Args:
        queue: file of a durable queue; None: jobs are kept in memory, as long as this lives.
        keep: see Keeper.
        listen: also at this tcp:// address, for clients whose keys are listed.
        on_event: see Engine. progress: see resolve_model.

    Attributes:
        address, tcp_address: for clients.

    Errors: as of QueueBackend and LocalServer.
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        *,
        queue: str | os.PathLike[str] | None = None,
        keep: float | None = None,
        listen: tuple[str, ServerKeys] | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._model, self._begun = model, time.monotonic()
        with ExitStack() as undo:
            self.backend = QueueBackend(model, config, on_event, queue, keep, progress)
            undo.callback(self.backend.close, True)
            self._desk = Desk(self.backend, model)
            undo.callback(self._desk.close)
            handlers = {**watch_handlers(self.backend.local.engine, self._about), **self._desk.handlers}
            server = LocalServer("up", model, handlers, self._desk.leave, listen)
            undo.callback(server.close)
            self._desk.serve(server)
            self.address, self.tcp_address = server.address, server.tcp_address
            self._undo = undo.pop_all()

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Until all workers have loaded the model. EngineError when the engine failed instead."""
        return self.backend.wait_ready(timeout)

    @property
    def failure(self) -> Exception | None:
        """Why the engine could not go on, if that happened."""
        return self.backend.local.engine.failure

    def stats(self) -> dict[str, Any]:
        """The queue as it stands."""
        return {**self.backend.keeper.stats(), **self._desk.stats()}

    def _about(self) -> dict[str, Any]:
        """What `coremill top` is told beside the engine's own figures."""
        return {
            "kind": "up",
            "model": self._model,
            "pid": os.getpid(),
            "seconds": round(time.monotonic() - self._begun, 3),
            "kept": self.stats(),
        }

    def close(self) -> None:
        """Clients first, which are told so; then the engine; then the queue. Unfinished jobs stay in a durable one."""
        self._undo.close()

    def __enter__(self) -> Resident:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
