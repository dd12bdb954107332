"""`coremill bench estimate BENCH.json COORDINATOR.json`: on paper, what machines with more cores would do.

    compute       the time one core here took for a step of one worker (`coremill bench`); each core there takes as long
    memory        weights once for each worker and step, keys and values of all its sequences, at the sockets' bandwidth
    coordinator   CPU time of a message for each worker and step (`coremill bench coordinator`), all on one core

The longest of the three is the time of a step. Cores in groups of K share a step of K times the sequences: weights and
messages per token are a Kth; what threads lose by waiting for each other is left out, and so are caches that hold the
weights of a small model, and the clock that many busy cores have.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coremill.config.errors import ConfigError
from coremill.tools.bench.text import columns


@dataclass(frozen=True, slots=True)
class Machine:
    """read: bytes a second of each socket, about 85 % of what its memory's data sheet says."""

    cores: int
    sockets: int
    read: float


# Two channels of DDR5-5600; twelve of DDR5-4800; twelve of DDR5-6400; two such sockets of 96 cores.
MACHINES = (Machine(8, 1, 76e9), Machine(64, 1, 390e9), Machine(192, 1, 520e9), Machine(192, 2, 520e9))
_GROUPS = (1, 8)


def bench_estimate(bench: Path, coordinator: Path) -> dict[str, Any]:
    """All machines, for each decode case of the bench that has as many sequences as the coordinator's workers had."""
    measured, messages = _read(bench, "one_worker"), _read(coordinator, "coordinator")
    sequences = messages["sequences"]
    cases = [r for r in measured["one_worker"] if r["what"] == "decode" and r["sequences"] == sequences]
    if not cases:
        raise ConfigError(f"{bench}: no decode of {sequences} sequences in it, which {coordinator} is about")
    model = measured["model"]
    rows = [
        estimate(case, model["streamed_bytes"], model["kv_token_bytes"], machine, group, messages["coordinator"])
        for case in cases
        for machine in MACHINES
        for group in _GROUPS
    ]
    return {"model": model, "estimate": rows}


def _read(path: Path, part: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        if found[part]:
            return found
    except (ValueError, LookupError, TypeError):
        pass
    command = "bench" if part == "one_worker" else f"bench {part}"
    raise ConfigError(f"{path}: not what `coremill {command} --json` prints")


def estimate(
    case: dict[str, Any],
    weight_bytes: int,
    kv_token_bytes: int,
    machine: Machine,
    group: int,
    coordinator: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """One machine with groups of `group` cores. case, coordinator: rows of the two reports."""
    workers, sequences = machine.cores // group, case["sequences"] * group
    kv_bytes = sequences * (case["context"] + 1) * kv_token_bytes
    seconds = {
        "compute": case["sequences"] / case["tokens_per_s"],
        "memory": workers / machine.sockets * (weight_bytes + kv_bytes) / machine.read,
        "coordinator": 1e-6 * workers * _message_us(coordinator, workers),
    }
    bound = max(seconds, key=lambda name: seconds[name])
    step = seconds[bound]
    return {
        "cores": machine.cores,
        "sockets": machine.sockets,
        "cores_per_worker": group,
        "context": case["context"],
        "sequences": workers * sequences,
        "step_ms": round(1e3 * step, 2),
        "bound_by": bound,
        "tokens_per_s": round(workers * sequences / step),
        "weights_gb_per_s": round(1e-9 * workers * weight_bytes / step, 1),
        "kv_gb_per_s": round(1e-9 * workers * kv_bytes / step, 1),
        "messages_per_s": round(workers / step),
        "coordinator_cores": round(seconds["coordinator"] / step, 3),
    }


def _message_us(rows: Sequence[dict[str, Any]], workers: int) -> float:
    """As measured with the next larger number of workers, or the largest."""
    larger = [row for row in rows if row["workers"] >= workers]
    row = min(larger, key=lambda row: row["workers"]) if larger else max(rows, key=lambda row: row["workers"])
    return row["cpu_us_per_message"]


def estimate_text(report: dict[str, Any]) -> str:
    parts = [f"Model {report['model']['name']}: decoding, estimated from one core"]
    for context in dict.fromkeys(row["context"] for row in report["estimate"]):
        cells = [
            (
                f"{row['cores']} cores, {row['sockets']} socket{'s'[: row['sockets'] - 1]}",
                *(str(row["cores_per_worker"]), f"{row['sequences']:,}", f"{row['step_ms']:.1f}", row["bound_by"]),
                *(f"{row['tokens_per_s']:,}", f"{row['weights_gb_per_s']:.0f}", f"{row['kv_gb_per_s']:.0f}"),
                *(f"{row['messages_per_s']:,}", f"{row['coordinator_cores']:.2f}"),
            )
            for row in report["estimate"]
            if row["context"] == context
        ]
        head = ("machine", "group", "sequences", "step, ms", "bound by", "t/s", "weights GB/s", "KV GB/s", "messages/s")
        parts.append(f"Context {context}\n{columns((*head, 'coordinator'), cells)}")
    parts.append("  group: cores of a worker. coordinator: cores' worth of CPU that it needs.")
    return "\n\n".join(parts) + "\n"
