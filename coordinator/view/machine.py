"""What the kernel says of workers' cores and processes. Read by whoever looks, never by those who are looked at."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coremill.config.cputimes import CpuTimes, clocks
from coremill.config.hostfiles import HostFiles
from coremill.config.smaps import Memory, measure_memory
from coremill.native.arena import ARENA_NAME

# Readings are at least so many seconds apart, and together take at most this share of the time.
_TIMES_SECONDS, _CLOCK_SECONDS, _MEMORY_SECONDS = 1.0, 3.0, 5.0
_MOST_OF_TIME = 0.01


class _Seldom:
    """Repeats a reading only when it is due."""

    def __init__(self, seconds: float, read: Callable[..., Any]) -> None:
        self._seconds, self._read = seconds, read
        self._next = 0.0
        self.value: Any = None

    def __call__(self, *args: Any) -> Any:
        begin = time.monotonic()
        if begin >= self._next:
            self.value = self._read(*args)
            end = time.monotonic()
            self._next = end + max(self._seconds, (end - begin) / _MOST_OF_TIME)
        return self.value


@dataclass(slots=True)
class Facts:
    """mhz, steal: by CPU, steal as a share of the time since the reading before the last; memory: by pid, of those that
    could be read. What is not known is not there."""

    mhz: Mapping[int, float] = field(default_factory=dict)
    steal: Mapping[int, float] = field(default_factory=dict)
    memory: Mapping[int, Memory] = field(default_factory=dict)


class MachineWatch:
    """Facts about the workers of one coordinator, each read as often as is sensible."""

    def __init__(self, files: HostFiles | None = None) -> None:
        self._files = files or HostFiles()
        self._before = CpuTimes.of_each(self._files)
        self._times = _Seldom(_TIMES_SECONDS, self._steal)
        self._clocks = _Seldom(_CLOCK_SECONDS, lambda: clocks(self._files))
        self._memory = _Seldom(_MEMORY_SECONDS, _memory_of)

    def facts(self, pids: Sequence[int], pack: str) -> Facts:
        """pids: of the workers; pack: the file they have mapped."""
        return Facts(self._clocks(), self._times(), self._memory(pids, pack))

    def _steal(self) -> dict[int, float]:
        now, before = CpuTimes.of_each(self._files), self._before
        self._before = now
        return {cpu: times.steal_since(before[cpu]) for cpu, times in now.items() if cpu in before}


def _memory_of(pids: Sequence[int], pack: str) -> dict[int, Memory]:
    found = {}
    for pid in pids:
        try:
            found[pid] = measure_memory(os.path.realpath(pack), ARENA_NAME, pid)
        except OSError:  # gone, or in another namespace
            continue
    return found
