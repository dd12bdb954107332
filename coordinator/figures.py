"""The figures of an engine, for `stats()` and for whoever watches it while it works.

Both are read from any thread while the engine goes on: single numbers, and copies of what may change in size. They are
true one by one, not all of the same instant.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coremill.config.engine import EngineConfig
    from coremill.coordinator.jobs import Lease, Slot
    from coremill.coordinator.scheduler import Scheduler
    from coremill.coordinator.shell import Shell
    from coremill.coordinator.stats import Place
    from coremill.coordinator.storage import Storage


def report(shell: Shell, storage: Storage, startup_seconds: float | None) -> dict[str, Any]:
    """What Engine.stats() returns."""
    geometry = storage.geometry
    return {
        "startup_seconds": startup_seconds,
        "queue": _queue(shell),
        "arena": {
            "blocks": geometry.num_blocks,
            "block_bytes": geometry.block_bytes,
            **{f"{where}_blocks": count for where, count in shell.scheduler.count_blocks().items()},
        },
        "sequences": dict(shell.scheduler.counts),
        "workers": shell.places.report(),
    }


def glance(shell: Shell, storage: Storage, config: EngineConfig, max_rows: int) -> dict[str, Any]:
    """Growing counters and what is there now, cheap enough for several times a second: no walk over the arena, no
    question to a worker. Two of them, `time` apart, make rates (coordinator/view/rates.py).

    time: CLOCK_MONOTONIC in seconds, the same for all processes of the machine. max_rows: so many of the sequences
    that each worker holds are listed, oldest first: key, phase, tokens of the prompt, new ones, most new ones.
    """
    scheduler, geometry, tables = shell.scheduler, storage.geometry, shell.scheduler.tables
    return {
        "time": time.monotonic(),
        "paused": scheduler.paused,
        "max_active": config.max_active,
        "step_tokens": config.step_tokens,
        "pack": str(storage.pack.path),
        "weight_bytes": storage.weight_bytes,
        "kv_position_bytes": geometry.token_bytes,
        "queue": _queue(shell),
        "arena": {
            "blocks": geometry.num_blocks,
            "block_bytes": geometry.block_bytes,
            "free_blocks": tables.pool.num_free,
            "cached_blocks": tables.index.num_cached,
        },
        "sequences": dict(scheduler.counts),
        "workers": [_worker(slot, place, max_rows) for slot, place in zip(scheduler.slots, shell.places, strict=True)],
    }


def _queue(shell: Shell) -> dict[str, int]:
    scheduler: Scheduler = shell.scheduler
    waiting = len(scheduler.waiting) + len(scheduler.suspects) + len(scheduler.parked)
    return {
        "waiting": waiting,
        "running": max(0, len(scheduler.sequences) - waiting),
        "finished": shell.num_finished,
        "failed": shell.num_failed,
    }


def _worker(slot: Slot, place: Place, max_rows: int) -> dict[str, Any]:
    leases = list(slot.leases.values())
    counts = place.counts()
    return {
        "worker": slot.index,
        "pid": place.pid,
        "cores": list(place.group.cores),
        "state": "draining" if slot.state == "draining" and place.state == "ready" else place.state,
        "restarts": place.num_restarts,
        "active": len(leases),
        "steps": counts["steps"],
        "step_rows": counts["step_rows"],
        "step_sequences": counts["step_sequences"],
        "prefill_tokens": counts["prefill_tokens"],
        "decode_tokens": counts["decode_tokens"],
        "kv_positions": counts["kv_positions"],
        "busy_seconds": counts["busy_ns"] * 1e-9,
        "blocks": len(set().union(*(lease.table.blocks for lease in leases))),
        "prompt_tokens": slot.prompt_tokens,
        "cached_tokens": slot.cached_tokens,
        "rows": _rows(leases[:max_rows]),
    }


def _rows(leases: Iterable[Lease]) -> list[tuple[str, str, int, int, int]]:
    sequences = [lease.sequence for lease in leases]
    return [
        (
            sequence.request.key,
            sequence.phase,
            sequence.num_prompt,
            len(sequence.tokens) - sequence.num_prompt,
            sequence.request.max_tokens,
        )
        for sequence in sequences
    ]
