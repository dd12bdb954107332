"""Engines in turns over the same file: what `coremill bench peer` and the table of peers are made of.

Each round runs every engine once over the whole file, in changing order, so that whatever else the machine does
falls on all. What counts is the ratio of a round; medians are over rounds. Starting up counts for nobody.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from coremill.config.cputimes import CpuTimes

OURS = "coremill"
# Load of others before a run, and steal during one, above which a figure is doubtful.
MUCH_BUSY, MUCH_STEAL = 0.05, 0.02
# How often half a second is waited for the machine to come to rest before a run.
_PATIENCE = 20


@dataclass(frozen=True, slots=True)
class Run:
    """One engine's run of the whole file.

    Attributes:
        seconds: from the first request to the last answer; ready_seconds: the start before that, None when unknown.
        prompt_tokens, completion_tokens: as the engine counts them.
        busy: share of the cores' time that something else took just before; steal: share that the hypervisor took
            meanwhile.
    """

    engine: str
    seconds: float
    rows: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    busy: float = 0.0
    steal: float = 0.0
    first_error: str | None = None
    ready_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """A contestant: `call` runs the whole file once."""

    name: str
    call: Callable[[], Run]


def compare(
    rounds: int, ours: Callable[[], Run], peers: Sequence[Engine], say: Callable[[str], None]
) -> dict[str, Any]:
    """Runs all `rounds` times in turns, coremill first in odd rounds, last in even ones.

    Returns {"rounds": [{"runs": {engine: Run as a dict}, "ratios": {peer: its seconds over ours}}, ...],
    "median": {"seconds": {engine: ...}, "ratios": {peer: ...}}, "warnings": [...]}.
    """
    cores = sorted(os.sched_getaffinity(0))
    engines = [Engine(OURS, ours), *peers]
    width = max(len(engine.name) for engine in engines)
    result: dict[str, Any] = {"rounds": [], "warnings": []}
    for number in range(1, rounds + 1):
        runs: dict[str, Run] = {}
        for engine in engines[:: 1 if number % 2 else -1]:
            runs[engine.name] = run = _watched(engine, cores, number, result["warnings"])
            say(
                f"round {number}: {engine.name:<{width}} {run.seconds:8.2f} s  {run.rows} rows, {run.errors} errors,"
                f" prompt {run.prompt_tokens}, completion {run.completion_tokens}"
                f" ({run.completion_tokens / run.seconds:.0f}/s)"
            )
        ratios = {peer.name: runs[peer.name].seconds / runs[OURS].seconds for peer in peers}
        say(f"round {number}: coremill is {_in_words(ratios)}")
        result["rounds"].append({"runs": {name: asdict(run) for name, run in runs.items()}, "ratios": ratios})
    result["median"] = {
        "seconds": {e.name: median(r["runs"][e.name]["seconds"] for r in result["rounds"]) for e in engines},
        "ratios": {e.name: median(r["ratios"][e.name] for r in result["rounds"]) for e in peers},
    }
    for warning in result["warnings"]:
        say(f"warning: {warning}")
    seconds = ", ".join(f"{name} {value:.2f} s" for name, value in result["median"]["seconds"].items())
    say(f"median: {seconds}; coremill is {_in_words(result['median']['ratios'])}")
    return result


def _in_words(ratios: dict[str, float]) -> str:
    return ", ".join(f"{ratio:.2f} x as fast as {name}" for name, ratio in ratios.items())


def _watched(engine: Engine, cores: Sequence[int], number: int, warnings: list[str]) -> Run:
    """One run, with what else the machine did at that time."""
    busy, quiet = wait_for_rest(cores)
    if busy > MUCH_BUSY:
        warnings.append(
            f"round {number}, before {engine.name}: the cores were {busy:.0%} busy with something else"
            f" (load average {os.getloadavg()[0]:.2f})"
        )
    run = engine.call()
    steal = steal_warned(cores, quiet, f"round {number}, {engine.name}", warnings)
    if run.errors:
        warnings.append(f"round {number}, {engine.name}: {run.errors} rows failed ({run.first_error or 'no message'})")
    return replace(run, engine=engine.name, busy=busy, steal=steal)


def how_it_ended(returncode: int, said: bytes) -> str:
    """A process's exit and the last line it said. Other engines are built for one CPU and die on another."""
    if returncode < 0:
        number = -returncode
        names = {each.value: each.name for each in signal.Signals}
        how = f"was killed by {names.get(number, f'signal {number}')}"
        how += " (built for another CPU?)" if number == signal.SIGILL else ""
    else:
        how = f"ended with code {returncode}"
    last = (said.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
    return f"{how}: {last[:300]}"


def rested(cores: Sequence[int], when: str, warnings: list[str], patience: int = _PATIENCE) -> CpuTimes:
    """As wait_for_rest; what still runs then is a warning."""
    busy, quiet = wait_for_rest(cores, patience)
    if busy > MUCH_BUSY:
        warnings.append(f"{when}: the cores were {busy:.0%} busy with something else before")
    return quiet


def steal_warned(cores: Sequence[int], since: CpuTimes, when: str, warnings: list[str]) -> float:
    """The share of the time that the hypervisor took; a warning when that is much."""
    steal = CpuTimes.read(cores).steal_since(since)
    if steal > MUCH_STEAL:
        warnings.append(f"{when}: the hypervisor took {steal:.1%} of the time")
    return steal


def wait_for_rest(cores: Sequence[int], patience: int = _PATIENCE) -> tuple[float, CpuTimes]:
    """Waits until little else runs, for so many half seconds at most: (busy share of the last one, its end)."""
    after = CpuTimes.read(cores)
    for _ in range(patience):
        before = after
        time.sleep(0.5)
        after = CpuTimes.read(cores)
        busy = after.busy_since(before)
        if busy <= MUCH_BUSY:
            break
    return busy, after
