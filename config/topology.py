"""Core groups: which cores a worker is pinned to, and why."""

from __future__ import annotations

from dataclasses import dataclass


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
