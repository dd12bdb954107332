"""Cores of workers that have nothing to run, lent to those that run: lone sequences at the end of a file get on faster,
and a prefix for which others wait is computed by all of them.

    A has nothing to run, B runs     Borrow(cores of A) to B: threads of B there join its steps if that is faster
    A gets something to run          Borrow(()) to B, and A begins: for the rest of a step they share the cores
    A or B dies, leaves, is retired  the loan is over

A worker lends all of its cores, to one other; each of several that run gets about as many lenders.
"""

from __future__ import annotations

from collections.abc import Sequence

from coremill.config.messages import Borrow
from coremill.config.topology import CoreGroup
from coremill.coordinator.events import Send
from coremill.coordinator.jobs import Slot

# More threads in one step have more to do with each other than with the step.
MOST_BORROWED = 63


class Loans:
    """Who lends to whom. groups: the cores of each worker; empty when nobody lends."""

    def __init__(self, groups: Sequence[CoreGroup]) -> None:
        self._groups = groups
        self.borrower_of: dict[int, int] = {}  # by lender
        self._settled: tuple = ()  # for whom, last time

    def settle(self, slots: Sequence[Slot], more: bool) -> list[Send]:
        """End the loans that have lost their reason; with `more`, begin and balance others. What borrowers are told."""
        if not self._groups:
            return []
        idle, busy = [], []
        for slot in slots:
            if slot.state == "ready":
                (busy if slot.leases else idle).append(slot)
        now = (more, [slot.index for slot in idle], [slot.index for slot in busy])
        if now == self._settled:
            return []
        self._settled = now
        before = self._borrowed()
        self._end(idle, busy)
        if more and idle and busy:
            self._begin(idle, busy)
            self._balance(busy)
        after = self._borrowed()
        return [
            Send(index, Borrow(after.get(index, ())))
            for index in sorted(before.keys() | after.keys())
            if before.get(index) != after.get(index) and slots[index].up and not slots[index].told_to_stop
        ]

    def _borrowed(self) -> dict[int, tuple[int, ...]]:
        """By borrower: the cores, nearest first."""
        lenders: dict[int, list[int]] = {}
        for lender, borrower in self.borrower_of.items():
            lenders.setdefault(borrower, []).append(lender)
        borrowed = {}
        for borrower, theirs in lenders.items():
            theirs.sort(key=lambda lender: self._distance(lender, borrower))
            cores = [core for lender in theirs for core in self._groups[lender].cores]
            borrowed[borrower] = tuple(cores[:MOST_BORROWED])
        return borrowed

    def _distance(self, one: int, other: int) -> tuple[bool, int, int]:
        """Groups are numbered so that neighbours share caches (config/topology.py)."""
        return (self._groups[one].numa != self._groups[other].numa, abs(one - other), one)

    def _end(self, idle: list[Slot], busy: list[Slot]) -> None:
        lenders, borrowers = {slot.index for slot in idle}, {slot.index for slot in busy}
        for lender, borrower in list(self.borrower_of.items()):
            if lender not in lenders or borrower not in borrowers:
                del self.borrower_of[lender]

    def _begin(self, idle: list[Slot], busy: list[Slot]) -> None:
        """To whoever has fewest lenders; of those to the one with most work left on the same NUMA node."""
        count = self._num_lenders(busy)
        work_left = {slot.index: slot.work_left for slot in busy}  # each a sum over its sequences
        for slot in idle:
            if slot.index not in self.borrower_of:
                borrower = min(work_left, key=lambda other: self._wish(slot.index, other, count, work_left))
                self.borrower_of[slot.index] = borrower
                count[borrower] += 1

    def _wish(self, lender: int, other: int, count: dict[int, int], work_left: dict[int, int]) -> tuple:
        """Smaller is lent to rather."""
        far = self._groups[other].numa != self._groups[lender].numa
        return (count[other], far, -work_left[other], other)

    def _balance(self, busy: list[Slot]) -> None:
        """When one that runs has two lenders more than another, the other gets its farthest."""
        count = self._num_lenders(busy)
        while count[most := max(count, key=count.get)] - count[fewest := min(count, key=count.get)] > 1:
            lenders = [lender for lender, borrower in self.borrower_of.items() if borrower == most]
            moved = max(lenders, key=lambda lender: self._distance(lender, most))
            self.borrower_of[moved] = fewest
            count[most] -= 1
            count[fewest] += 1

    def _num_lenders(self, busy: list[Slot]) -> dict[int, int]:
        count = {slot.index: 0 for slot in busy}
        for borrower in self.borrower_of.values():
            count[borrower] += 1
        return count

    def check(self, slots: Sequence[Slot]) -> None:
        """AssertionError unless all who lend have nothing to run and all who borrow have."""
        for lender, borrower in self.borrower_of.items():
            assert slots[lender].state == "ready" and not slots[lender].leases, "lent by one that cannot spare it"
            assert slots[borrower].state == "ready" and slots[borrower].leases, "lent to one that has no use for it"
