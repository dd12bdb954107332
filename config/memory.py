"""How much memory there is for us, and how much of it the KV arena takes when nobody says.

    limit      min(MemTotal, every cgroup limit along the chain)
    available  min(MemAvailable, headroom of every such group), as it is now
    arena      min(workers x max_active requests of `ctx` tokens, ARENA_SHARE of what the weights leave)

The arena is filled only as sequences grow, so its size is a promise rather than a purchase; the share keeps the
promise payable beside the page cache that holds the weights, the workers and whatever else runs here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from coremill.config.cgroups import memory_limits
from coremill.config.errors import ConfigError
from coremill.config.hostfiles import HostFiles

# Of the memory available once the weights are resident.
ARENA_SHARE = 0.5

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes. `why` names what sets the limit; `available` may be set by another ancestor than `limit` is."""

    limit: int
    available: int
    why: str


def parse_size(text: str) -> int:
    """ "512M", "1.5 GiB", "4096" -> bytes, in powers of 1024. ValueError when it is no size."""
    word = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = word[-1:] if word[-1:] in "kmgt" else ""
    number = word.removesuffix(unit).strip() if unit else word
    # float() alone would also read "nan", "1_0" and "1e3".
    if not number or not set(number) <= set("0123456789.") or number.count(".") > 1 or number == ".":
        raise ValueError(f"not a size: {text!r}")
    return int(float(number) * _UNITS[unit])


def format_size(num_bytes: float) -> str:
    """1610612736 -> "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def memory_budget(root: str | os.PathLike[str] = "/") -> MemoryBudget | None:
    """What this process may use; None when the kernel does not say (no /proc)."""
    files = HostFiles(root)
    meminfo = files.table("/proc/meminfo", ":")
    kilobytes = {
        name: int(text.split()[0]) for name, text in meminfo.items() if text.split()[:1] and text.split()[0].isdecimal()
    }
    limits = memory_limits(files)
    total = kilobytes.get("MemTotal", 0) << 10
    # Kernels before 3.14, and some sandboxes, have no MemAvailable.
    free = kilobytes.get("MemAvailable", kilobytes.get("MemFree", 0)) << 10
    candidates = [(total, "memory of the machine")] if total else []
    candidates += [(limit.limit, f"cgroup limit ({limit.path})") for limit in limits]
    if not candidates:
        return None
    limit, why = min(candidates)
    headroom = [free or limit, *(limit.available for limit in limits)]
    return MemoryBudget(limit, min(headroom), why)


def default_arena_bytes(
    *, block_bytes: int, blocks_per_request: int, num_active: int, weight_bytes: int, memory: MemoryBudget | None
) -> int:
    """Bytes of an arena for `num_active` requests (workers x max_active), bounded by the memory there is.

    Args:
        block_bytes: one arena block; the result is a multiple of it.
        blocks_per_request: blocks of the longest request (`ctx` tokens).
        weight_bytes: length of the packed weights, which should stay in memory beside it.
        memory: what `memory_budget` found; None when unknown, which bounds nothing.

    Raises:
        ConfigError: not even one longest request fits.
    """
    wanted = num_active * blocks_per_request
    if memory is None:
        return wanted * block_bytes
    left = max(0, memory.available - weight_bytes)
    affordable = int(left * ARENA_SHARE) // block_bytes
    if affordable < blocks_per_request:
        raise ConfigError(
            f"one request of the longest kind (ctx) needs {format_size(blocks_per_request * block_bytes)} of KV cache,"
            f" but only {format_size(affordable * block_bytes)} may be used: {ARENA_SHARE:.0%} of the"
            f" {format_size(memory.available)} available less {format_size(weight_bytes)} of weights"
            f" ({memory.why}); lower ctx, or set arena by hand"
        )
    return min(wanted, affordable) * block_bytes
