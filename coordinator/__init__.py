"""Owns jobs, sequences, block tables, the prefix index, the journal and the workers' lives."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coremill.coordinator.python.aio import AsyncCoordinator
    from coremill.coordinator.python.flow import Failure, Reject, Result, Retry
    from coremill.coordinator.python.job import Completion, Job
    from coremill.coordinator.python.sync import Coordinator

__all__ = ["AsyncCoordinator", "Completion", "Coordinator", "Failure", "Job", "Reject", "Result", "Retry"]

_MODULES = {
    "AsyncCoordinator": "aio",
    "Completion": "job",
    "Coordinator": "sync",
    "Failure": "flow",
    "Job": "job",
    "Reject": "flow",
    "Result": "flow",
    "Retry": "flow",
}


def __getattr__(name: str) -> Any:
    # Lazily: the text helper and the batch runner import their own parts only.
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"coremill.coordinator.python.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'coremill.coordinator' has no attribute {name!r}")
