"""Which backend a Coordinator gets."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from coremill.config.engine import EngineConfig
from coremill.config.errors import ConfigError

if TYPE_CHECKING:
    from coremill.coordinator.python.backend import Backend


def new_backend(
    model: str | os.PathLike[str],
    config: EngineConfig,
    on_event: Callable[[dict[str, Any]], None] | None,
    queue: str | os.PathLike[str] | None,
    keep: float | None,
) -> Backend:
    """With a queue when there is a file for it, else one that keeps nothing. ConfigError for wrong values."""
    if queue is None:
        from coremill.coordinator.python.local import LocalBackend

        if keep is not None:
            raise ConfigError(f"keep is {keep!r}: it needs a queue=... whose outcomes it is about")
        return LocalBackend(model, config, on_event)
    from coremill.coordinator.queue.backend import QueueBackend

    if not isinstance(queue, (str, os.PathLike)) or not isinstance(os.fspath(queue), str) or not os.fspath(queue):
        raise ConfigError(f"queue is {queue!r}: it must be the path of a file")
    return QueueBackend(model, config, on_event, queue, check_keep(keep))


def check_keep(keep: Any) -> float | None:
    """Seconds for which outcomes are kept."""
    if keep is None:
        return None
    if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep < math.inf:
        raise ConfigError(f"keep is {keep!r}: it must be a number of seconds above 0, or None")
    return float(keep)
