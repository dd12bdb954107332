"""What control groups allow this process: CPU time, CPUs, memory, over the whole chain of parents.

A limit of any ancestor binds, and the tightest may sit on a group far above ours. The chain is found in two
steps: /proc/self/cgroup says where we are in each hierarchy, /proc/self/mountinfo says which part of the
hierarchy is visible and where:

    /proc/self/cgroup     4:cpu,cpuacct:/docker/abc/job        our group, from the hierarchy's root
    /proc/self/mountinfo  ... /docker/abc /sys/fs/cgroup/cpu   root and mount point of what we can see
    chain                 /sys/fs/cgroup/cpu/job, /sys/fs/cgroup/cpu

Both versions may be present at once, each with some of the controllers, so all hierarchies are walked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from coremill.config.hostfiles import HostFiles

# Version 1 spells "no limit" as the largest multiple of the page size; no machine has this much.
_NO_MEMORY_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class CpuQuota:
    """`quota` microseconds of CPU time in every `period`; `path` is the file that says so."""

    quota: int
    period: int
    path: str

    @property
    def cpus(self) -> float:
        return self.quota / self.period

    @property
    def cores(self) -> int:
        """Cores that can be kept busy all the time; at least one. Half a core more would only be throttled."""
        return max(1, self.quota // self.period)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit in bytes, what is used of it now without caches the kernel can drop, and the file that sets it."""

    limit: int
    used: int
    path: str

    @property
    def available(self) -> int:
        return max(0, self.limit - self.used)


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One mounted hierarchy. `chain`: folders of our group and of its visible ancestors, innermost first."""

    version: int
    controllers: frozenset[str]
    chain: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Mount:
    version: int
    options: frozenset[str]
    root: str
    point: str


def _unescape(text: str) -> str:
    """mountinfo writes blanks and the like as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _mounts(files: HostFiles) -> Iterator[_Mount]:
    for line in (files.text("/proc/self/mountinfo") or "").splitlines():
        left, separator, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if not separator or len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        options = frozenset(kind[2].split(","))
        yield _Mount(2 if kind[0] == "cgroup2" else 1, options, _unescape(fields[3]), _unescape(fields[4]))


def _chain(path: str, mounts: list[_Mount]) -> tuple[str, ...]:
    """Folders from the group at `path` up to the mount point of the mount that shows the most ancestors."""
    showing = [mount for mount in mounts if mount.root == "/" or f"{path}/".startswith(f"{mount.root}/")]
    if not showing:
        # Our group lies outside what is mounted (namespaces set up by hand). What is visible may still limit us.
        return (mounts[0].point,)
    mount = min(showing, key=lambda mount: len(mount.root))
    below = PurePosixPath(path.removeprefix(mount.root).lstrip("/"))
    if ".." in below.parts:
        return (mount.point,)
    return tuple(str(PurePosixPath(mount.point, part)) for part in (below, *below.parents))


def hierarchies(files: HostFiles) -> list[Hierarchy]:
    """Every hierarchy this process is in and can see."""
    mounts = list(_mounts(files))
    found = []
    for line in (files.text("/proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        number, names, path = parts
        version = 2 if number == "0" and not names else 1
        controllers = frozenset(names.split(",")) - {""}
        mounted = [m for m in mounts if m.version == version and (version == 2 or controllers <= m.options)]
        if mounted:
            found.append(Hierarchy(version, controllers, _chain(path, mounted)))
    return found


def _folders(files: HostFiles, controller: str) -> Iterator[tuple[int, str]]:
    """(version, folder) of every group that may hold files of `controller`, innermost first."""
    for hierarchy in hierarchies(files):
        if hierarchy.version == 2 or controller in hierarchy.controllers:
            for folder in hierarchy.chain:
                yield hierarchy.version, folder


def _quota_of(files: HostFiles, version: int, folder: str) -> CpuQuota | None:
    if version == 2:
        path = f"{folder}/cpu.max"
        words = (files.text(path) or "max").split()
        quota = int(words[0]) if words[0].isdecimal() else None
        period = int(words[1]) if len(words) > 1 and words[1].isdecimal() else 100_000
    else:
        path = f"{folder}/cpu.cfs_quota_us"
        quota = files.number(path)
        period = files.number(f"{folder}/cpu.cfs_period_us")
    if quota is None or quota <= 0 or not period or period <= 0:
        return None
    return CpuQuota(quota, period, path)


def cpu_quota(files: HostFiles) -> CpuQuota | None:
    """The tightest CPU quota along the chain; None when no group limits CPU time."""
    quotas = [_quota_of(files, version, folder) for version, folder in _folders(files, "cpu")]
    return min((quota for quota in quotas if quota), key=lambda quota: quota.cpus, default=None)


def cpuset(files: HostFiles) -> tuple[tuple[int, ...], str] | None:
    """The CPUs our cpuset allows and the file that says so; None without one."""
    for version, folder in _folders(files, "cpuset"):
        for name in (
            ("cpuset.cpus.effective", "cpuset.cpus") if version == 2 else ("cpuset.effective_cpus", "cpuset.cpus")
        ):
            cpus = files.cpus(f"{folder}/{name}")
            if cpus:
                return cpus, f"{folder}/{name}"
    return None


def _memory_of(files: HostFiles, version: int, folder: str) -> MemoryLimit | None:
    if version == 2:
        # Above memory.high a group is slowed down until it is useless: a limit like memory.max for a plan.
        names, used_name, prefix = ("memory.max", "memory.high"), "memory.current", ""
    else:
        names, used_name, prefix = ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"
    limits = [(files.number(f"{folder}/{name}"), f"{folder}/{name}") for name in names]
    limit, path = min(((n, path) for n, path in limits if n is not None and n > 0), default=(None, ""))
    if limit is None or limit >= _NO_MEMORY_LIMIT:
        return None
    stat = files.table(f"{folder}/memory.stat")
    cache = sum(int(stat.get(f"{prefix}{name}", "0")) for name in ("active_file", "inactive_file"))
    used = files.number(f"{folder}/{used_name}") or 0
    return MemoryLimit(limit, max(0, used - cache), path)


def memory_limits(files: HostFiles) -> list[MemoryLimit]:
    """Every memory limit along the chain, tightest first."""
    limits = [_memory_of(files, version, folder) for version, folder in _folders(files, "memory")]
    return sorted((limit for limit in limits if limit), key=lambda limit: limit.limit)


def oom_kills(files: HostFiles) -> int:
    """Processes the kernel has killed for want of memory, in our groups and, when it says so, on the machine.

    A number to compare with an earlier one: it says that memory was short, not whose death it was.
    """
    count = int(files.table("/proc/vmstat").get("oom_kill", "0"))
    for version, folder in _folders(files, "memory"):
        name = "memory.events" if version == 2 else "memory.oom_control"
        count += int(files.table(f"{folder}/{name}").get("oom_kill", "0"))
    return count
