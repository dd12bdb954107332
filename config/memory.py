"""How much memory there is for us, and how much of it the KV arena takes when nobody says.

    limit      min(MemTotal, every cgroup limit along the chain)
    available  min(MemAvailable, headroom of every such group), as it is now
    fixed      weights + what each worker has for itself + coordinator and text helper
    arena      min(workers x max_active requests of `ctx` tokens, ARENA_SHARE of available - fixed)
               or what the user says, as long as fixed + arena are available

and, under a limit on addresses (ulimit -v), no more of it than a worker can map beside the weights.

The arena is filled only as sequences grow, so its size is a promise rather than a purchase; the plan keeps the
promise payable beside the page cache that holds the weights and whatever else runs here.
"""

from __future__ import annotations

import math
import os
import resource
from dataclasses import dataclass, replace

from coremill.config.arena import BLOCK_TOKENS
from coremill.config.cgroups import memory_limits
from coremill.config.errors import ConfigError
from coremill.config.hostfiles import HostFiles
from coremill.config.model import ModelSpec

# Of the memory available beside everything else, when nobody says.
ARENA_SHARE = 0.5
# A worker's interpreter, libraries and tables; coordinator and text helper together. Measured, with some air.
WORKER_BYTES = 32 << 20
BASE_BYTES = 96 << 20
# Addresses of a worker beside weights, scratch and arena: libraries, and of each thread a stack (8 MiB) and the room
# that malloc reserves for it (64 MiB). Measured, with some air.
LIBRARY_ADDRESSES = 32 << 20
THREAD_ADDRESSES = 80 << 20

# What is free differs by some megabytes from one start to the next: page cache and kernel memory count as used.
SUGGESTION_SLACK = 8 << 20

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes. `why` names what sets the limit; `available` may be set by another ancestor than `limit` is.

    addresses: what each process may map (RLIMIT_AS); None without such a limit.
    """

    limit: int
    available: int
    why: str
    addresses: int | None = None


def parse_size(text: str) -> int:
    """ "512M", "1.5 GiB", "4096" -> bytes, in powers of 1024. ValueError when it is no size."""
    word = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = word[-1:] if word[-1:] in "kmgt" else ""
    number = word.removesuffix(unit).strip() if unit else word
    # float() alone would also read "nan", "1_0" and "1e3".
    if not number or not set(number) <= set("0123456789.") or number.count(".") > 1 or number == ".":
        raise ValueError(f"not a size: {text!r}")
    size = float(number) * _UNITS[unit]
    if size == math.inf:
        raise ValueError(f"too large: a size of {len(number)} digits")
    return int(size)


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
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    return MemoryBudget(limit, min(headroom), why, None if addresses == resource.RLIM_INFINITY else addresses)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What an engine takes, in bytes, beside the arena.

    weights: the packed model, once for all. per_worker: each of num_workers has for itself.
    block_bytes: one arena block; blocks_per_request: blocks of the longest request (`ctx` tokens).
    threads: of each worker.
    """

    weights: int
    per_worker: int
    num_workers: int
    max_active: int
    block_bytes: int
    blocks_per_request: int
    threads: int = 1

    @property
    def fixed(self) -> int:
        """Everything but the arena."""
        return self.weights + self.num_workers * self.per_worker + BASE_BYTES

    @property
    def addresses(self) -> int:
        """What a worker maps beside the arena. While it loads it has the whole pack mapped, and the weights for the
        kernels."""
        return 2 * self.weights + self.per_worker + LIBRARY_ADDRESSES + self.threads * THREAD_ADDRESSES

    @property
    def longest(self) -> int:
        """Arena bytes of the longest request."""
        return self.blocks_per_request * self.block_bytes


def worker_bytes(spec: ModelSpec, *, step_rows: int, max_active: int, threads: int) -> int:
    """An estimate, rather too high, of the memory a worker has for itself: interpreter, libraries and scratch.

    Of scratch, each row of a step has the residual stream, its norm, queries, keys and values, attention and the
    hidden layer as f32, three of them once more as int8 with scales; each sequence has a row of logits.
    """
    attention = spec.num_heads * spec.head_dim
    keys = 2 * spec.num_kv_heads * spec.head_dim
    f32 = 2 * spec.hidden_size + 2 * attention + keys + spec.ffn_size
    packed = spec.hidden_size + attention + spec.ffn_size
    of_row = 4 * f32 + 3 * packed // 2
    of_sequence = 4 * (spec.vocab_size + 3 * spec.hidden_size)
    return WORKER_BYTES + step_rows * of_row + max_active * of_sequence + threads * 8 * spec.vocab_size


def plan_arena(need: MemoryNeed, wanted: int | None, memory: MemoryBudget | None) -> int:
    """Bytes of the arena, in whole blocks.

    Args:
        wanted: what the user says; None: room for all active requests, bounded by ARENA_SHARE of what is left.
        memory: what `memory_budget` found; None when unknown, which bounds nothing.

    Raises:
        ConfigError: it does not fit beside everything else, or not one longest request does; the message has the
            sum and the settings that would fit.
    """
    if wanted is not None and wanted < need.block_bytes:
        text = f"arena is {format_size(wanted)}: it must hold at least one block of {format_size(need.block_bytes)}"
        raise ConfigError(text)
    if wanted is None:
        num_blocks = need.num_workers * need.max_active * need.blocks_per_request
        if memory is not None:
            affordable = _left(need, memory, ARENA_SHARE) // need.block_bytes
            if affordable < need.blocks_per_request:
                raise ConfigError(_too_little(need, None, memory))
            num_blocks = min(num_blocks, affordable)
    else:
        num_blocks = wanted // need.block_bytes
        if memory is not None and num_blocks * need.block_bytes > _left(need, memory, 1):
            raise ConfigError(_too_little(need, wanted, memory))
    return num_blocks * need.block_bytes


def _left(need: MemoryNeed, memory: MemoryBudget, share: float) -> int:
    left = int(max(0, memory.available - need.fixed) * share)
    return left if memory.addresses is None else min(left, max(0, memory.addresses - need.addresses))


def _too_little(need: MemoryNeed, wanted: int | None, memory: MemoryBudget) -> str:
    """The sum, and the options that would fit."""
    arena = need.longest if wanted is None else wanted
    what = f"one request of ctx {need.blocks_per_request * BLOCK_TOKENS}" if wanted is None else "the arena asked for"
    options = _fitting(need, wanted, memory)
    fitting = f"this would fit: {', or '.join(options)}" if options else "no setting fits"
    if memory.addresses is not None and memory.addresses < need.addresses + arena:
        return (
            f"not enough addresses: a worker maps {format_size(need.addresses)} of weights, libraries and scratch"
            f" + {format_size(arena)} of KV cache ({what}) = {format_size(need.addresses + arena)}, but each process"
            f" may have {format_size(memory.addresses)} (ulimit -v, RLIMIT_AS); {fitting}"
        )
    text = (
        f"not enough memory: weights {format_size(need.weights)} + {need.num_workers} x {format_size(need.per_worker)}"
        f" for workers + {format_size(BASE_BYTES)} for the coordinator + {format_size(arena)} of KV cache ({what})"
        f" = {format_size(need.fixed + arena)}, but {format_size(memory.available)} are free"
    )
    if memory.limit > memory.available:
        text += f" of {format_size(memory.limit)}"
    text += f" ({memory.why})"
    if wanted is None:
        text += f"; without --arena, requests get {ARENA_SHARE:.0%} of what the rest leaves"
    return f"{text}; {fitting}"


def _fitting(need: MemoryNeed, wanted: int | None, memory: MemoryBudget) -> list[str]:
    """Each of these options alone makes the plan fit, also when a little less is free at the next start."""
    memory = replace(memory, available=memory.available - SUGGESTION_SLACK)
    options = []
    left = _left(need, memory, 1)
    if left >= (need.longest if wanted is None else need.block_bytes):
        options.append(f"--arena {left >> 20}M" if left >= 1 << 20 else f"--arena {left >> 10}K")
    if wanted is None:
        blocks = _left(need, memory, ARENA_SHARE) // need.block_bytes
        if blocks:
            options.append(f"--ctx {blocks * BLOCK_TOKENS}")
    share, arena = (ARENA_SHARE, need.longest) if wanted is None else (1, wanted)
    for num_workers in range(need.num_workers - 1, 0, -1):
        if _left(replace(need, num_workers=num_workers), memory, share) >= arena:
            options.append(f"--workers {num_workers}")
            break
    return options
