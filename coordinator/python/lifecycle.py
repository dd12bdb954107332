"""Ends that nobody asks for: of the interpreter, of the last reference, and a fork in between."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import TYPE_CHECKING

from coremill.config.errors import EngineError

if TYPE_CHECKING:
    from coremill.coordinator.python.backend import Backend
    from coremill.coordinator.python.sync import Coordinator

_coordinators: weakref.WeakSet[Coordinator] = weakref.WeakSet()


def watch_over(coordinator: Coordinator, backend: Backend) -> None:
    """Close it when the interpreter ends or nobody has it any more; tell its jobs in a forked child."""
    _coordinators.add(coordinator)
    weakref.finalize(coordinator, _let_go, os.getpid(), backend)


def belongs_elsewhere(owner: int) -> EngineError:
    return EngineError(
        f"this coordinator belongs to process {owner}; process {os.getpid()} was forked from it and cannot use it: "
        "create one after the fork, or start processes with 'spawn'"
    )


def _let_go(owner: int, backend: Backend) -> None:
    """On whatever thread found out that nobody has it, so nothing is waited for."""
    if os.getpid() == owner:
        backend.close(wait=False)


def _close_all() -> None:
    for coordinator in list(_coordinators):
        coordinator.close()


def _end_all_in_child() -> None:
    """Jobs that were unfinished at a fork will not end in the child: whoever asks there is told."""
    for coordinator in list(_coordinators):
        for job in coordinator._roster.jobs():
            job._end_in_child(belongs_elsewhere(coordinator._owner))


# The threads are daemons, which the end of the interpreter would cut off in the middle of a call.
atexit.register(_close_all)
os.register_at_fork(after_in_child=_end_all_in_child)
