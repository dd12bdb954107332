"""For tests only: rows that are fatal to their worker. Nothing here runs unless the environment asks for it.

COREMILL_TEST_POISON=SIGSEGV:text   a worker that computes a row whose prompt contains `text` gets that signal
COREMILL_TEST_POISON=HANG:text      ... never completes the step
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from coremill.config.errors import ConfigError
from coremill.worker.loop import WorkerLoop

VARIABLE = "COREMILL_TEST_POISON"


class PoisonedLoop(WorkerLoop):
    """A loop that some rows are fatal to."""

    def __init__(self, *args: Any, poison: str, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        name, _, text = poison.partition(":")
        if (name != "HANG" and name not in signal.Signals.__members__) or not text:
            raise ConfigError(f"{VARIABLE} is {poison!r}: it must be the name of a signal or HANG, a colon and a text")
        self._signal = None if name == "HANG" else signal.Signals[name]
        self._text = text.encode()

    def step(self, plan) -> None:
        if any(self._is_poison(sequence) for sequence, _ in plan):
            self.model = _Fatal(self.model, self._signal)
        super().step(plan)

    def _is_poison(self, sequence) -> bool:
        prompt = sequence.tokens[: sequence.num_prompt]
        return self._text in b"".join(bytes(self.token_bytes[token]) for token in prompt)


class _Fatal:
    def __init__(self, model: Any, number: signal.Signals | None) -> None:
        self._model, self._signal = model, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def step(self, batch: Any) -> Any:
        if self._signal is None:
            while True:
                time.sleep(3600)
        os.kill(os.getpid(), self._signal)
        return self._model.step(batch)
