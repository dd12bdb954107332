"""Core groups: which cores each worker is pinned to, and why.

    CPUs online, in the affinity mask, in the cpuset             -> usable CPUs
    one CPU of each physical core first, SMT siblings behind     -> places, in order of preference
    min(places, floor of the cgroup CPU quota)                   -> budget
    groups of `cores_per_worker` places close to each other      -> core groups

Groups run independently, so slow (efficiency) cores make good groups of their own; within a group of several
cores every step waits for the slowest, so a group keeps to one kind of core, one L3 cache and one NUMA node
as far as the numbers allow.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from coremill.config.cgroups import CpuQuota, cpu_quota, cpuset
from coremill.config.errors import ConfigError
from coremill.config.hostfiles import HostFiles, format_cpu_list, parse_cpu_list

_CPUS = "/sys/devices/system/cpu"


@dataclass(frozen=True, slots=True)
class CoreGroup:
    """The cores of one worker.

    Attributes:
        cores: logical CPU numbers, ascending; one compute thread runs on each.
        numa: NUMA node they belong to.
        why: one phrase for people: how this group came about.
    """

    cores: tuple[int, ...]
    numa: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """A logical CPU a compute thread may be pinned to.

    Attributes:
        core: (socket, core id); SMT siblings share it.
        rank: 0 for the first usable CPU of its core, 1 for a second, ...
        l3: CPUs that share its L3 cache, as the kernel lists them; "" when unknown.
        slow: an efficiency core of a hybrid CPU.
    """

    cpu: int
    core: tuple[int, int]
    rank: int
    numa: int
    l3: str
    slow: bool


@dataclass(frozen=True, slots=True)
class CpuBudget:
    """The CPUs this process may use.

    Attributes:
        places: every usable CPU, best first.
        budget: how many of them may be kept busy.
        num_cores: physical cores among the places.
        limits: what makes the budget smaller than the machine, one phrase each.
    """

    places: tuple[Place, ...]
    budget: int
    num_cores: int
    online: tuple[int, ...]
    quota: CpuQuota | None
    limits: tuple[str, ...]

    @property
    def reason(self) -> str:
        return "; ".join(self.limits) or "every core of the machine"


def _affinity(files: HostFiles) -> tuple[int, ...] | None:
    """The mask this process was given. That of its first thread, not of whoever calls: threads get pinned."""
    cpus = files.table("/proc/self/status", ":").get("Cpus_allowed_list")
    return parse_cpu_list(cpus) or None if cpus else None


def _usable(files: HostFiles) -> tuple[tuple[int, ...], tuple[int, ...], list[str]]:
    """(usable CPUs, CPUs online, what took others away)."""
    mask = _affinity(files)
    online = files.cpus(f"{_CPUS}/online") or files.numbered(_CPUS, "cpu") or mask or tuple(range(os.cpu_count() or 1))
    usable, limits = set(online), []
    allowed = cpuset(files)
    if allowed and usable & set(allowed[0]) and not usable <= set(allowed[0]):
        usable &= set(allowed[0])
        limits.append(f"cpuset {format_cpu_list(allowed[0])} ({allowed[1]})")
    # The kernel keeps the mask inside the cpuset, so it is a reason of its own only when it takes more away.
    if mask and usable & set(mask) and not usable <= set(mask):
        usable &= set(mask)
        limits.append(f"affinity mask {format_cpu_list(mask)}")
    return tuple(sorted(usable)), online, limits


def _slow_cpus(files: HostFiles, cpus: tuple[int, ...]) -> frozenset[int]:
    """Efficiency cores: Intel names them, other hybrids give them a clearly lower capacity."""
    named = files.cpus("/sys/devices/cpu_atom/cpus")
    if named and files.cpus("/sys/devices/cpu_core/cpus"):
        return frozenset(named)
    capacity = {cpu: files.number(f"{_CPUS}/cpu{cpu}/cpu_capacity") for cpu in cpus}
    known = [value for value in capacity.values() if value]
    return frozenset(cpu for cpu, value in capacity.items() if value and value < 0.75 * max(known))


def _places(files: HostFiles, cpus: tuple[int, ...]) -> list[Place]:
    node_of = {}
    for node in files.numbered("/sys/devices/system/node", "node"):
        for cpu in files.cpus(f"/sys/devices/system/node/node{node}/cpulist") or ():
            node_of[cpu] = node
    slow = _slow_cpus(files, cpus)
    num_seen: dict[tuple[int, int], int] = {}
    places = []
    for cpu in cpus:
        topology = f"{_CPUS}/cpu{cpu}/topology"
        siblings = files.cpus(f"{topology}/thread_siblings_list")
        core_id = files.number(f"{topology}/core_id")
        if core_id is None:
            core_id = min(siblings) if siblings else cpu
        socket = files.number(f"{topology}/physical_package_id") or 0
        # Some hypervisors give every CPU the core id 0; siblings, where listed, say what is really shared.
        core = (socket, min(siblings) if siblings else core_id)
        num_seen[core] = num_seen.get(core, 0) + 1
        l3 = files.text(f"{_CPUS}/cpu{cpu}/cache/index3/shared_cpu_list") or ""
        places.append(Place(cpu, core, num_seen[core] - 1, node_of.get(cpu, 0), l3, cpu in slow))
    return places


def _by_preference(places: list[Place]) -> list[Place]:
    """First CPUs of fast cores, then of slow ones, then siblings; the largest NUMA node first, so that a budget
    smaller than the machine is spent near one copy of the weights."""
    cores_of_node: dict[int, int] = {}
    for place in places:
        if place.rank == 0:
            cores_of_node[place.numa] = cores_of_node.get(place.numa, 0) + 1
    first_of_l3: dict[str, int] = {}
    for place in places:
        first_of_l3.setdefault(place.l3, place.cpu)

    def order(place: Place) -> tuple:
        return (
            *(place.rank, place.slow, -cores_of_node.get(place.numa, 0), place.numa),
            *(first_of_l3[place.l3], place.cpu),
        )

    return sorted(places, key=order)


def survey(root: str | os.PathLike[str] = "/") -> CpuBudget:
    """What the machine below `root` allows this process."""
    files = HostFiles(root)
    usable, online, limits = _usable(files)
    places = _by_preference(_places(files, usable))
    quota = cpu_quota(files)
    num_cores = sum(place.rank == 0 for place in places)
    budget = len(places)
    if quota and quota.cores < budget:
        budget = quota.cores
        limits.append(f"cgroup quota of {quota.cpus:g} CPUs ({quota.path})")
    return CpuBudget(tuple(places), budget, num_cores, online, quota, tuple(limits))


def discover(
    *,
    workers: int | None = None,
    cores_per_worker: int | None = None,
    root: str | os.PathLike[str] = "/",
) -> list[CoreGroup]:
    """The core groups of this machine.

    Args:
        workers: that many groups; None: as many as there are physical cores for in the budget.
        cores_per_worker: cores in each group; None: one.
        root: where /proc and /sys are looked for.

    Raises:
        ConfigError: more cores are asked for than this process may keep busy.
    """
    return groups_of(survey(root), workers=workers, cores_per_worker=cores_per_worker)


def groups_of(found: CpuBudget, *, workers: int | None = None, cores_per_worker: int | None = None) -> list[CoreGroup]:
    """The core groups for a budget; arguments and errors as in `discover`."""
    size = cores_per_worker or 1
    wanted = (workers or 1) * size
    if wanted > found.budget:
        raise ConfigError(_too_many(found, workers, size))
    # Siblings share the units that compute, so they are used only when there is no other way to what was asked.
    usable = max(min(found.num_cores, found.budget), wanted)
    groups = _form(list(found.places[:usable]), size, workers)
    tail = f"{usable} of {len(found.online)} CPUs used: {found.reason}" if found.limits else ""
    return [CoreGroup(*_describe(group, tail)) for group in groups]


def _too_many(found: CpuBudget, workers: int | None, size: int) -> str:
    asked = f"--workers {workers} x --cores-per-worker {size}" if workers else f"--cores-per-worker {size}"
    smt = f" ({found.num_cores} physical cores)" if found.num_cores < found.budget else ""
    why = "; ".join(found.limits) or "the machine has no more"
    return f"{asked} needs {(workers or 1) * size} cores, but only {found.budget}{smt} may be used: {why}"


def _form(places: list[Place], size: int, workers: int | None) -> list[list[Place]]:
    """Groups of `size` places, as close together as possible. Without a wanted number of groups none spans two
    NUMA nodes, unless no node has enough cores."""
    groups: list[list[Place]] = []
    closeness: list[Callable[[Place], object]] = [
        lambda place: (place.numa, place.l3, place.slow, place.rank),
        lambda place: (place.numa, place.slow),
        lambda place: place.numa,
        lambda place: None,
    ]
    for near in closeness:
        if near is closeness[-1] and workers is None and groups:
            break
        neighbours: dict[object, list[Place]] = {}
        for place in places:
            neighbours.setdefault(near(place), []).append(place)
        for members in neighbours.values():
            whole = len(members) // size * size
            groups += [members[begin : begin + size] for begin in range(0, whole, size)]
        taken = {place.cpu for group in groups for place in group}
        places = [place for place in places if place.cpu not in taken]
    return groups[:workers]


def _describe(group: list[Place], tail: str) -> tuple[tuple[int, ...], int, str]:
    cpus = tuple(sorted(place.cpu for place in group))
    nodes = sorted({place.numa for place in group})
    caches = sorted({place.l3 for place in group})
    kind = "efficiency core" if all(place.slow for place in group) else "physical core"
    if any(place.rank for place in group):
        kind = "SMT sibling, as more than the physical cores were asked for"
        parts = [f"{len(group)} CPUs with an {kind}" if len(group) > 1 else f"an {kind}"]
    else:
        parts = [f"{len(group)} {kind}s" if len(group) > 1 else f"one {kind}"]
    parts.append("NUMA nodes " + ", ".join(map(str, nodes)) if len(nodes) > 1 else f"NUMA node {nodes[0]}")
    if len(caches) > 1:
        parts.append(f"spans {len(caches)} L3 caches")
    elif caches[0]:
        parts.append(f"L3 of CPUs {caches[0]}")
    return cpus, nodes[0], ", ".join(parts) + (f"; {tail}" if tail else "")
