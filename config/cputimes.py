"""What CPUs are called, how they and processes spend their time, and how fast they run, from /proc."""

from __future__ import annotations

import os
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
        """Of these CPUs together; one that the kernel does not list counts nothing."""
        by_cpu = cls.of_each(files)
        found = [by_cpu[core] for core in cores if core in by_cpu]
        return cls(sum(t.total for t in found), sum(t.idle for t in found), sum(t.steal for t in found))

    @classmethod
    def of_each(cls, files: HostFiles | None = None) -> dict[int, CpuTimes]:
        """By CPU."""
        found = {}
        for name, text in (files or HostFiles()).table("/proc/stat").items():
            if name.startswith("cpu") and name[3:].isdecimal():
                # user nice system idle iowait irq softirq steal; guest times are part of user.
                row = ([int(word) for word in text.split()] + [0] * 8)[:8]
                found[int(name[3:])] = cls(sum(row), row[3] + row[4], row[7])
        return found

    def steal_since(self, earlier: CpuTimes) -> float:
        """Share of the time that the hypervisor gave to others."""
        return (self.steal - earlier.steal) / max(1, self.total - earlier.total)

    def busy_since(self, earlier: CpuTimes) -> float:
        """Share of the time in which anything ran, or waited for the hypervisor."""
        return 1 - (self.idle - earlier.idle) / max(1, self.total - earlier.total)


def cpu_seconds(pid: int) -> float:
    """What all threads of a process have used since it began, those that have ended too; 0 when it is gone."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return 0.0
    return (int(fields[14 - 3]) + int(fields[15 - 3])) / os.sysconf("SC_CLK_TCK")  # utime, stime


def stat_fields(pid: int | str) -> list[bytes]:
    """Fields of /proc/PID/stat, or of "self", from the third on, the state: the name before it may hold anything.
    OSError when it is gone."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def cpu_name(files: HostFiles) -> str:
    """Of the first CPU; "unknown" where the kernel does not say."""
    return files.table("/proc/cpuinfo", ":").get("model name", "unknown")


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
