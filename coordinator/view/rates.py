"""From snapshots of growing counters (coordinator/figures.py) to what is shown: rates, shares, states.

A view is a dict that JSON can carry, with the same names in `coremill top --json` and in `run --log-format json`.
Sizes are in bytes, times in seconds, rates per second; None: not known.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from coremill.config.smaps import Memory
from coremill.coordinator.view.ceiling import Ceiling
from coremill.coordinator.view.machine import Facts, MachineWatch

Snapshot = Mapping[str, Any]
# Rates are means over so many seconds; rows are few and come in bursts.
TOKEN_SECONDS, ROW_SECONDS = 3.0, 15.0


class History:
    """The latest snapshots of one coordinator, all from the same one, oldest first.

    watch: None leaves out what only the kernel knows. ceiling: what was measured here (load_ceiling), if it was.
    """

    def __init__(self, watch: MachineWatch | None = None, ceiling: Ceiling | None = None) -> None:
        self._watch = watch
        self._ceiling = ceiling
        self._snapshots: deque[Snapshot] = deque()

    def add(self, snapshot: Snapshot) -> None:
        kept = self._snapshots
        kept.append(snapshot)
        while len(kept) > 2 and snapshot["time"] - kept[1]["time"] >= ROW_SECONDS:
            kept.popleft()

    def view(self) -> dict[str, Any]:
        """What the last snapshot shows, with rates since earlier ones. At least one must have been added."""
        now = self._snapshots[-1]
        pids = [worker["pid"] for worker in now["workers"] if worker["pid"] is not None]
        facts = self._watch.facts(pids, now["pack"]) if self._watch else Facts()
        return view_of(self._before(TOKEN_SECONDS), self._snapshots[0], now, facts, self._ceiling)

    def _before(self, seconds: float) -> Snapshot:
        """The youngest snapshot that is at least so old, else the oldest."""
        now = self._snapshots[-1]["time"]
        old = [snapshot for snapshot in self._snapshots if now - snapshot["time"] >= seconds]
        return old[-1] if old else self._snapshots[0]


def view_of(before: Snapshot, long_before: Snapshot, now: Snapshot, facts: Facts, ceiling: Ceiling | None) -> dict:
    """Token rates are since `before`, or `long_before` for a worker whose step takes longer, as are row rates."""
    cores = sum(len(worker["cores"]) for worker in now["workers"] if worker["state"] not in ABSENT)
    most = ceiling.of_cores(cores) / cores if ceiling is not None and cores else None
    workers = [_worker(*_earlier(worker, before, long_before), worker, now, facts, most) for worker in now["workers"]]
    arena = now["arena"]
    used = arena["blocks"] - arena["free_blocks"] - arena["cached_blocks"]
    queue = _queue(long_before, now)
    about = {name: now[name] for name in _ABOUT if name in now}
    return {
        "time": round(time.time(), 3),
        **about,
        "paused": now["paused"],
        "queue": queue,
        "arena": {
            "blocks": arena["blocks"],
            "used": used,
            "cached": arena["cached_blocks"],
            "block_bytes": arena["block_bytes"],
        },
        # Workers share blocks.
        "totals": totals(workers, ceiling.of_cores(cores) if most else None) | {"arena_blocks": used},
        "workers": workers,
    }


def _queue(before: Snapshot, now: Snapshot) -> dict[str, Any]:
    """Of a run: rows of the file; of others: what was submitted."""
    engine, rows = now["queue"], now.get("rows")
    if rows is None:
        done, errors, total = engine["finished"], engine["failed"], None
        waiting = engine["waiting"] + now.get("kept", {}).get("waiting", 0)  # what a queue has not handed over yet
        span, gained = now["time"] - before["time"], done + errors
        gained -= before["queue"]["finished"] + before["queue"]["failed"]
    else:
        done, errors, total = rows["results"], rows["errors"], rows["total"]
        waiting = engine["waiting"]
        if total is not None:
            waiting = max(0, total - rows["skipped"] - done - errors - engine["running"])
        then = before["rows"]
        span, gained = now["time"] - before["time"], done + errors - then["results"] - then["errors"]
    return {
        "waiting": waiting,
        "running": engine["running"],
        "done": done,
        "errors": errors,
        "skipped": rows["skipped"] if rows else 0,
        "rows": total,
        "rows_are_estimated": bool(rows) and total is not None and not rows["input_ended"],
        "rows_per_s": round(gained / span, 3) if span > 0 else None,
        "seconds_left": now.get("seconds_left"),
    }


def _earlier(worker: Mapping[str, Any], *snapshots: Snapshot) -> tuple[Mapping[str, Any], float]:
    """(the worker, the time) in the first of these snapshots since which it has ended a step, else in the last."""
    for snapshot in snapshots:
        before = snapshot["workers"][worker["worker"]]
        if before["steps"] < worker["steps"] or not worker["active"]:
            break
    return before, snapshot["time"]


def _worker(
    before: Mapping[str, Any],
    since: float,
    worker: Mapping[str, Any],
    now: Snapshot,
    facts: Facts,
    most_per_core: float | None,
) -> dict[str, Any]:
    """most_per_core: bytes per second that each core reads at best while all do."""
    span = now["time"] - since
    if span <= 0:  # a first look has no rates
        gained = dict.fromkeys(_COUNTERS, 0)
    else:
        gained = {name: worker[name] - before[name] for name in _COUNTERS}
    steps = gained["steps"]
    num_bytes = steps * now["weight_bytes"] + gained["kv_positions"] * now["kv_position_bytes"]
    cores = worker["cores"]
    memory = facts.memory.get(worker["pid"]) if worker["pid"] is not None else None

    def per_second(amount: float, digits: int = 1) -> float | None:
        return round(amount / span, digits) if span > 0 else None

    return {
        "worker": worker["worker"],
        "pid": worker["pid"],
        "cores": list(cores),
        "mhz": _mean([facts.mhz[core] for core in cores if core in facts.mhz], 0),
        "steal": _mean([facts.steal[core] for core in cores if core in facts.steal], 4),
        "state": shown_state(worker, now["paused"]),
        "active": worker["active"],
        "max_active": now["max_active"],
        "batch_fill": round(gained["step_sequences"] / steps / now["max_active"], 4) if steps else None,
        "prefill_tokens": worker["prefill_tokens"],
        "decode_tokens": worker["decode_tokens"],
        "prefill_tokens_per_s": per_second(gained["prefill_tokens"]),
        "decode_tokens_per_s": per_second(gained["decode_tokens"]),
        "busy": min(1.0, per_second(gained["busy_seconds"], 4)) if span > 0 else None,
        "gb_per_s": per_second(num_bytes * 1e-9, 3),
        "ceiling_gb_per_s": round(most_per_core * len(cores) * 1e-9, 3) if most_per_core else None,
        **_memory(memory),
        "arena_blocks": worker["blocks"],
        "prompt_tokens": worker["prompt_tokens"],
        "cached_tokens": worker["cached_tokens"],
        "prefix_hits": _share(worker["cached_tokens"], worker["prompt_tokens"]),
        "restarts": worker["restarts"],
        "rows": [dict(zip(_ROW, row, strict=True)) for row in worker["rows"]],
    }


ABSENT = ("stopped", "retired")
_ABOUT = ("kind", "model", "pid", "input", "output", "seconds", "tokens", "kept")
_COUNTERS = ("steps", "step_sequences", "prefill_tokens", "decode_tokens", "kv_positions", "busy_seconds")
_ROW = ("id", "phase", "prompt_tokens", "new_tokens", "max_tokens")
_SUMS = (
    "active", "prefill_tokens", "decode_tokens", "prefill_tokens_per_s", "decode_tokens_per_s", "gb_per_s", "pss_bytes",
    "pss_weights_bytes", "pss_arena_bytes", "pss_private_bytes", "prompt_tokens", "cached_tokens", "restarts",
)  # fmt: skip
_MEANS = (("mhz", 0), ("steal", 4), ("batch_fill", 4), ("busy", 4))


def totals(workers: Sequence[Mapping[str, Any]], ceiling: float | None) -> dict[str, Any]:
    """All workers together: sums of amounts; means of shares, over those who are there and for whom they are known."""
    found: dict[str, Any] = {}
    present = [worker for worker in workers if worker["state"] not in ABSENT]
    for name in _SUMS:
        known = [worker[name] for worker in workers if worker[name] is not None]
        found[name] = round(sum(known), 3) if known else None
    for name, digits in _MEANS:
        found[name] = _mean([worker[name] for worker in present if worker[name] is not None], digits)
    found["max_active"] = sum(worker["max_active"] for worker in present)
    found["prefix_hits"] = _share(found["cached_tokens"], found["prompt_tokens"])
    found["ceiling_gb_per_s"] = round(ceiling * 1e-9, 3) if ceiling else None
    return found


def shown_state(worker: Mapping[str, Any], paused: bool) -> str:
    """starting, running, idle, paused, leaving (no longer wanted), stopped (has left) or retired (dies again and
    again)."""
    if worker["state"] == "draining":
        return "leaving"
    if worker["state"] != "ready":
        return worker["state"]
    return "running" if worker["active"] else "paused" if paused else "idle"


def _memory(memory: Memory | None) -> dict[str, int | None]:
    return {
        "pss_bytes": memory.pss if memory else None,
        "pss_weights_bytes": memory.weights if memory else None,
        "pss_arena_bytes": memory.arena if memory else None,
        "pss_private_bytes": memory.private if memory else None,
    }


def _mean(values: Sequence[float], digits: int) -> float | None:
    return round(sum(values) / len(values), digits) if values else None


def _share(part: int | None, whole: int | None) -> float | None:
    return round(part / whole, 4) if whole else None
