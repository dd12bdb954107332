"""Facts and measurements of this machine, for `doctor` and `bench`.

Facts are read through HostFiles, so a folder can stand for a machine. Measurements run on threads pinned to the
cores that workers would get; the C side releases the GIL, so a thread of Python is a thread of the machine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from coremill.config.cputimes import CpuTimes
from coremill.config.hostfiles import HostFiles
from coremill.config.memory import MemoryBudget, memory_budget
from coremill.config.topology import CoreGroup

_THP = "/sys/kernel/mm/transparent_hugepage"


# ---- facts ----


def isa_facts() -> dict[str, Any]:
    """The instruction sets and CPU features as the C side sees them. ConfigError for a wrong COREMILL_ISA."""
    from coremill.native import ffi, lib

    def text(pointer: Any) -> str:
        return ffi.string(pointer).decode()

    known = [text(lib.cm_isa_name(i)) for i in range(lib.cm_isa_count())]
    return {
        "active": text(lib.cm_isa_active()),
        "supported": [name for i, name in enumerate(known) if lib.cm_isa_supported(i)],
        "known": known,
        "features": {
            text(lib.cm_cpu_feature_name(i)): bool(lib.cm_cpu_has(i)) for i in range(lib.cm_cpu_feature_count())
        },
    }


def huge_page_facts(files: HostFiles) -> dict[str, Any]:
    """Transparent huge pages of anonymous and of shared memory, and the pool of explicit ones (sizes in bytes)."""

    def chosen(name: str) -> str | None:
        # "always [madvise] never": the brackets mark what is set.
        words = (files.text(f"{_THP}/{name}") or "").split()
        return next((word.strip("[]") for word in words if word.startswith("[")), None)

    meminfo = files.table("/proc/meminfo", ":")

    def kilobytes(name: str) -> int:
        return int(meminfo.get(name, "0").split()[0])

    return {
        "anonymous": chosen("enabled"),
        "shared": chosen("shmem_enabled"),
        "defrag": chosen("defrag"),
        "size": files.number(f"{_THP}/hpage_pmd_size"),
        "pool": {
            "size": kilobytes("Hugepagesize") << 10,
            "total": kilobytes("HugePages_Total"),
            "free": kilobytes("HugePages_Free"),
        },
    }


def l3_bytes(files: HostFiles, cpu: int) -> int:
    """Size of a CPU's L3 cache; 0 when unknown."""
    text = files.text(f"/sys/devices/system/cpu/cpu{cpu}/cache/index3/size") or ""
    units = {"K": 1 << 10, "M": 1 << 20}
    return int(text[:-1]) * units[text[-1]] if text[:-1].isdecimal() and text[-1] in units else 0


# ---- measurements ----


def on_cores(cores: Sequence[int], call: Callable[[], Any]) -> list[Any]:
    """Runs `call` at the same time on a thread pinned to each core; what each returned, in order of the cores.

    UnsupportedHostError when a thread may not be pinned; what `call` raises otherwise.
    """
    results: list[Any] = [None] * len(cores)
    failures: list[BaseException] = []
    ready = threading.Barrier(len(cores))

    def run(index: int) -> None:
        try:
            _pin(cores[index])
            ready.wait()
            results[index] = call()
        except threading.BrokenBarrierError:
            pass  # another thread failed, and says why
        except BaseException as error:
            failures.append(error)
            ready.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(cores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def _pin(core: int) -> None:
    from coremill.config.errors import UnsupportedHostError

    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:
        raise UnsupportedHostError(f"cannot pin a thread to core {core}: {error.strerror}") from None


def bandwidth(cores: Sequence[int], num_bytes: int, seconds: float) -> tuple[float, float]:
    """(bytes per second that all cores together read, share of the buffers on huge pages).

    Each core streams over its own `num_bytes`. UnsupportedHostError when pinning or memory fails.
    """
    from coremill.config.errors import UnsupportedHostError
    from coremill.native import ffi, lib

    rate, huge, err = ffi.new("double *"), ffi.new("uint64_t *"), ffi.new("char[]", 256)
    if lib.cm_bench_bandwidth(list(cores), len(cores), num_bytes, seconds, rate, huge, err, len(err)) < 0:
        raise UnsupportedHostError(ffi.string(err).decode())
    return rate[0], min(1.0, huge[0] / (num_bytes * len(cores)))


def buffer_bytes(cores: Sequence[int], memory: MemoryBudget | None, files: HostFiles) -> int:
    """Size of each core's buffer for `bandwidth`: far more than its share of L3, little of the memory."""
    per_core = max(64 << 20, min(512 << 20, 4 * l3_bytes(files, cores[0])))
    if memory is not None:
        per_core = min(per_core, memory.available // (4 * len(cores)))
    return max(1 << 20, per_core >> 20 << 20)


def active_isa() -> int:
    """Number of the selected instruction set, as the C side counts them."""
    facts = isa_facts()
    return facts["known"].index(facts["active"])


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine gives at best. Rates per second; `_all` with every core busy, lists in order of `cores`.

    Attributes:
        hertz: clock of each core while all compute.
        dot_macs: int8 multiply-adds of each core while all compute; dot_macs_one: of the first alone.
        fma_macs_one: float32 multiply-adds of the first core alone.
        read_one, read_all: bytes read from memory by one core and by all together.
        on_huge_pages: share of the memory read that lay on huge pages.
        steal: share of the time of these cores that the hypervisor gave to others meanwhile.
    """

    cores: tuple[int, ...]
    isa: str
    hertz: list[float]
    dot_macs: list[float]
    dot_macs_one: float
    fma_macs_one: float
    read_one: float
    read_all: float
    on_huge_pages: float
    steal: float

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers in the units people use: MHz, GB/s, 1e9 int8 operations/s (two to a multiply-add)."""
        clock = median(self.hertz)
        return {
            "cores": list(self.cores),
            "isa": self.isa,
            "clock_mhz": [round(value / 1e6) for value in self.hertz],
            "int8_gops_per_core": [round(2e-9 * value, 1) for value in self.dot_macs],
            "int8_gops_one_core": round(2e-9 * self.dot_macs_one, 1),
            "int8_macs_per_cycle": round(median(self.dot_macs) / clock, 1),
            "fma_gflops_one_core": round(2e-9 * self.fma_macs_one, 1),
            "read_gb_per_s_one_core": round(1e-9 * self.read_one, 1),
            "read_gb_per_s_all_cores": round(1e-9 * self.read_all, 1),
            "on_huge_pages": round(self.on_huge_pages, 3),
            "steal": round(self.steal, 4),
        }


# Load averages above this share of the cores mean that something else was running.
_BUSY_SHARE = 0.3
# Shorter measurements of the memory, in seconds, are for tests.
_LONG_ENOUGH = 0.2


def _busy_load() -> float:
    return max(0.5, _BUSY_SHARE * (os.cpu_count() or 1))


def load_average() -> float:
    """Of the last minute, before we add to it."""
    return round(os.getloadavg()[0], 2)


def disturbances(load: float, ceilings: dict[str, Any]) -> list[str]:
    """What speaks against figures measured now. ceilings: Ceilings.as_dict()."""
    found = []
    if load > _busy_load():
        found.append(
            f"the machine was busy before the measurement (load {load:g}), so that figures are too low and not kept"
        )
    one, every = ceilings["read_gb_per_s_one_core"], ceilings["read_gb_per_s_all_cores"]
    if every < 0.95 * one and len(ceilings["cores"]) > 1:
        found.append(f"all cores read {every} GB/s, less than one alone ({one}): something else was running")
    return found


def measure_ceilings(groups: Sequence[CoreGroup], *, seconds: float = 0.25, rounds: int = 1) -> Ceilings:
    """Measures every ceiling `rounds` times, some 5 x `seconds` each, and keeps medians (the best clock).

    What the memory gives is remembered for `coremill top`, when it was measured long enough.
    """
    from coremill.coordinator.view.ceiling import measured_now, save_ceiling
    from coremill.native import lib

    busy = load_average() > _busy_load()

    files = HostFiles()
    cores = tuple(core for group in groups for core in group.cores)
    isa = active_isa()
    num_bytes = buffer_bytes(cores, memory_budget(), files)
    first = cores[:1]
    before = CpuTimes.read(cores, files)
    taken: list[tuple] = []
    for _ in range(rounds):
        one = on_cores(first, lambda: (lib.cm_bench_dot(isa, seconds), lib.cm_bench_fma(isa, seconds)))[0]
        every = on_cores(cores, lambda: (lib.cm_bench_clock(seconds / 4), lib.cm_bench_dot(isa, seconds)))
        read_one, _ = bandwidth(first, num_bytes, seconds)
        read_all, huge = bandwidth(cores, num_bytes, seconds)
        taken.append((*one, [e[0] for e in every], [e[1] for e in every], read_one, read_all, huge))
    dot_one, fma_one, clocks, dots, read_one, read_all, huge = zip(*taken, strict=True)
    if seconds >= _LONG_ENOUGH:
        save_ceiling(measured_now(median(read_one), median(read_all), len(cores)), disturbed=busy)
    return Ceilings(
        cores=cores,
        isa=isa_facts()["active"],
        hertz=[max(column) for column in zip(*clocks, strict=True)],
        dot_macs=[median(column) for column in zip(*dots, strict=True)],
        dot_macs_one=median(dot_one),
        fma_macs_one=median(fma_one),
        read_one=median(read_one),
        read_all=median(read_all),
        on_huge_pages=min(huge),
        steal=CpuTimes.read(cores, files).steal_since(before),
    )
