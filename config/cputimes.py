"""How CPUs spend their time and how fast they run, from /proc."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coremill.config.hostfiles import HostFiles


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Ticks of some CPUs since boot, from /proc/stat."""

    total: int
    idle: int
    steal: int

    @classmethod
    def read(cls, cores: Sequence[int], files: HostFiles | None = None) -> CpuTimes:
        lines = (files or HostFiles()).table("/proc/stat")
        rows = [[int(word) for word in lines.get(f"cpu{core}", "").split()] for core in cores]
        # user nice system idle iowait irq softirq steal; guest times are part of user.
        rows = [row[:8] + [0] * (8 - len(row)) for row in rows]
        return cls(sum(map(sum, rows)), sum(row[3] + row[4] for row in rows), sum(row[7] for row in rows))

    def steal_since(self, earlier: CpuTimes) -> float:
        """Share of the time that the hypervisor gave to others."""
        return (self.steal - earlier.steal) / max(1, self.total - earlier.total)

    def busy_since(self, earlier: CpuTimes) -> float:
        """Share of the time in which anything ran, or waited for the hypervisor."""
        return 1 - (self.idle - earlier.idle) / max(1, self.total - earlier.total)


def clocks(files: HostFiles | None = None) -> dict[int, float]:
    """MHz of each CPU at this moment, from /proc/cpuinfo; empty where that does not say (ARM, some containers)."""
    found: dict[int, float] = {}
    cpu = -1
    for line in ((files or HostFiles()).text("/proc/cpuinfo") or "").splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name == "processor" and value.isdecimal():
            cpu = int(value)
        elif name == "cpu MHz" and cpu >= 0:
            found[cpu] = float(value)
    return found
