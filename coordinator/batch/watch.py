"""A run as it is seen while it works: by its own display and log, and by `coremill top`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from coremill.config.errors import EngineError, RequestError
from coremill.coordinator.batch.estimate import Count, seconds_left
from coremill.coordinator.view.ceiling import load_ceiling
from coremill.coordinator.view.handlers import cancel_key, watch_handlers
from coremill.coordinator.view.machine import MachineWatch
from coremill.coordinator.view.rates import History

if TYPE_CHECKING:
    from coremill.coordinator.batch.plan import Plan
    from coremill.coordinator.batch.runner import Progress
    from coremill.coordinator.engine import Engine


class RunWatch:
    """What one run shows. `look` and `view` are for the thread of the run, all else for any thread.

    model, input, output: what people call them. plan: set once it is known.
    """

    def __init__(self, engine: Engine, model: str, input: str, output: str) -> None:
        self.plan: Plan | None = None
        self.cancelled: set[str] = set()  # rows that somebody ended by hand
        self._engine = engine
        self._names = {"kind": "run", "model": model, "pid": os.getpid(), "input": input, "output": output}
        self._progress: Progress | None = None
        self._seconds_left: float | None = None
        self._history = History(MachineWatch(), load_ceiling())

    def look(self, progress: Progress) -> bool:
        """Remember the figures of this moment; rates come from several looks. False when the engine has ended."""
        self._progress = progress
        try:
            self._history.add({**self._engine.glance(), **self.about()})
        except EngineError:
            return False
        return True

    def view(self) -> dict[str, Any]:
        """What the last look saw, as coordinator/view/rates.py has it, with the time that is left."""
        view = self._history.view()
        self._seconds_left = view["queue"]["seconds_left"] = self._left(view)
        return view

    def _left(self, view: dict[str, Any]) -> float | None:
        progress, sums = self._progress, view["totals"]
        if progress.num_rows is None:
            return None
        num_left = progress.num_rows - progress.num_skipped - progress.num_results - progress.num_errors
        computed = (sums["prefill_tokens"], sums["decode_tokens"], progress.completion_tokens)
        rate = sums["decode_tokens_per_s"] or 0.0
        count = Count(progress.seconds, num_left, sums["active"], progress.num_results, *computed, rate)
        return seconds_left(count, self.plan)

    def about(self) -> dict[str, Any]:
        """What a snapshot says of the run beside the engine's own figures."""
        progress = self._progress
        if progress is None:
            return {**self._names, "seconds": 0.0, "rows": _rows(0, 0, 0, 0, None, False)}
        rows = (progress.num_read, progress.num_skipped, progress.num_results, progress.num_errors)
        return {
            **self._names,
            "seconds": round(progress.seconds, 3),
            "rows": _rows(*rows, progress.num_rows, progress.input_ended),
            "tokens": {
                "prompt": progress.prompt_tokens,
                "cached": progress.cached_tokens,
                "completion": progress.completion_tokens,
            },
            "seconds_left": self._seconds_left,
        }

    def cancel(self, custom_id: str) -> None:
        """End a row: it becomes an error of the run. RequestError "not_found" when it is not waiting or running."""
        self.cancelled.add(custom_id)
        try:
            cancel_key(self._engine, custom_id)
        except RequestError:
            self.cancelled.discard(custom_id)
            raise

    def handlers(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """For coordinator/local_socket."""
        return watch_handlers(self._engine, self.about, self.cancel)


def _rows(read: int, skipped: int, results: int, errors: int, total: int | None, input_ended: bool) -> dict[str, Any]:
    return {
        "read": read,
        "skipped": skipped,
        "results": results,
        "errors": errors,
        "total": total,
        "input_ended": input_ended,
    }
