"""CPU time of a run by process: the coordinator, the text helper and each worker, from all rows in reach to the end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from coremill.config.cputimes import cpu_seconds

if TYPE_CHECKING:
    from coremill.coordinator.engine import Engine
    from coremill.coordinator.text.service import TextService


class CpuUse:
    """Counts from its making on. A process that is started again meanwhile counts from its own start."""

    def __init__(self, engine: Engine, text: TextService) -> None:
        self._engine, self._text = engine, text
        self._coordinator = time.process_time()
        self._before = {pid: cpu_seconds(pid) for pid in (text.pid, *self._worker_pids()) if pid is not None}

    def _worker_pids(self) -> list[int | None]:
        return [worker["pid"] for worker in self._engine.stats(measure=False)["workers"]]

    def report(self) -> dict[str, Any]:
        """Seconds: {"coordinator", "text_helper", "workers": one for each place, in order}."""
        return {
            "coordinator": time.process_time() - self._coordinator,
            "text_helper": self._since(self._text.pid),
            "workers": [self._since(pid) for pid in self._worker_pids()],
        }

    def _since(self, pid: int | None) -> float:
        return 0.0 if pid is None else max(0.0, cpu_seconds(pid) - self._before.get(pid, 0.0))


def cpu_lines(spent: dict[str, Any]) -> list[str]:
    """A table for people: seconds of each process and its share of all."""
    rows = [("coordinator", spent["coordinator"]), ("text helper", spent["text_helper"])]
    rows += [(f"worker {index}", seconds) for index, seconds in enumerate(spent["workers"])]
    whole = sum(seconds for _, seconds in rows) or 1.0
    return [
        f"{'process':20} {'CPU seconds':>12} {'share':>6}",
        *(f"{name:20} {seconds:12.2f} {seconds / whole:6.1%}" for name, seconds in rows),
    ]
