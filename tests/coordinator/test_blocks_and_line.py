"""The block books, and the order of those who wait."""

from __future__ import annotations

import pytest

from coremill.config.request import SequenceRequest
from coremill.coordinator.blocks import BlockPool
from coremill.coordinator.jobs import PATIENCE, Sequence, WaitingLine


def waiting(ticket: int, tokens: int = 10, priority: int = 0, ran: bool = False) -> Sequence:
    sequence = Sequence(ticket, SequenceRequest(str(ticket), (1,), tokens, priority=priority), [1])
    sequence.last_worker = 0 if ran else -1
    return sequence


def order(line: WaitingLine) -> list[int]:
    served = []
    while (sequence := line.peek()) is not None:
        line.pop(sequence)
        served.append(sequence.ticket)
    return served


def test_the_lowest_free_block_is_taken_first():
    pool = BlockPool(6)
    assert pool.take(4) == [0, 1, 2, 3]
    pool.give_back([2, 0])
    assert pool.take(3) == [0, 2, 4]
    assert pool.num_free == 1
    pool.check([[0, 1], [2, 3, 4]])


def test_wrong_books_are_noticed():
    pool = BlockPool(4)
    taken = pool.take(2)
    with pytest.raises(AssertionError):
        pool.check([])
    with pytest.raises(AssertionError):
        pool.check([taken, taken])
    with pytest.raises(ValueError, match="3 blocks asked for, 2 are free"):
        pool.take(3)
    pool.give_back(taken)
    with pytest.raises(ValueError, match="block 0 is free already"):
        pool.give_back([0])


def test_order_of_service():
    line = WaitingLine()
    for sequence in (waiting(1, 5), waiting(2, 9), waiting(3, 9), waiting(4, 99, ran=True), waiting(5, 1, priority=1)):
        line.push(sequence)
    assert [sequence.ticket for sequence in line] and len(line) == 5
    assert order(line) == [5, 4, 2, 3, 1]


def test_what_ran_before_goes_on_oldest_first():
    line = WaitingLine()
    for ticket in (7, 3, 5):
        line.push(waiting(ticket, ticket, ran=True))
    assert order(line) == [3, 5, 7]


def test_leaving_and_coming_again():
    line = WaitingLine()
    first, second = waiting(1, 50), waiting(2, 5)
    line.push(first)
    line.push(second)
    line.remove(first)
    assert line.peek() is second
    line.push(first)
    assert order(line) == [1, 2] and len(line) == 0


def test_a_short_row_is_not_overtaken_forever():
    line = WaitingLine()
    line.push(waiting(0, 1))
    for ticket in range(1, 2 * PATIENCE):
        line.push(waiting(ticket, 1000))
    assert order(line).index(0) == PATIENCE
