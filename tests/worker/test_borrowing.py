"""How many borrowed cores a worker uses, with durations that are made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coremill.worker.borrowing import FIRST_RETRY, LAST_RETRY, TRIES, Borrowing

EIGHT = tuple(range(1, 9))


def steps(borrowing: Borrowing, count: int, seconds: Callable[[int], float], num_rows: int = 1) -> list[int]:
    """How many cores each of `count` steps borrowed. seconds: of a step, by that number."""
    used = []
    for _ in range(count):
        cores = borrowing.choose(num_rows)
        borrowing.observe(num_rows, len(cores), seconds(len(cores)))
        used.append(len(cores))
    return used


def test_nothing_is_used_that_is_not_lent():
    borrowing = Borrowing(1)
    assert steps(borrowing, 5, lambda count: 1.0) == [0] * 5
    borrowing.offer((3,))
    assert borrowing.choose(1) == (3,)
    borrowing.observe(1, 1, 0.1)
    borrowing.offer(())
    assert steps(borrowing, 5, lambda count: 1.0) == [0] * 5


@pytest.mark.parametrize(("with_it", "use"), [(0.6, 1), (0.94, 1), (0.96, 0), (1.5, 0)])
def test_a_core_is_used_when_it_is_worth_it(with_it, use):
    borrowing = Borrowing(1)
    borrowing.offer((1,))
    used = steps(borrowing, 2 * TRIES + 20, lambda count: with_it if count else 1.0)
    assert used[: 2 * TRIES] == [1] * TRIES + [0] * TRIES  # with it first: a short sequence has gained
    assert used[2 * TRIES :] == [use] * 20


@pytest.mark.parametrize(
    ("num_own", "best", "tried"), [(1, 8, {0, 1, 3, 7, 8}), (1, 3, {0, 1, 3, 7}), (2, 2, {0, 2, 6})]
)
def test_of_many_cores_as_many_as_help(num_own, best, tried):
    borrowing = Borrowing(num_own)
    borrowing.offer(EIGHT)
    used = steps(borrowing, 30, lambda count: 1 / (num_own + min(count, best)) + max(0, count - best))
    assert set(used) == tried and set(used[-10:]) == {best}


def test_one_disturbed_step_decides_nothing():
    borrowing = Borrowing(1)
    borrowing.offer((1,))
    slow = iter([9.0] + [0.5] * 100)
    assert steps(borrowing, 30, lambda count: next(slow) if count else 1.0)[-20:] == [1] * 20


def test_a_neighbour_that_takes_the_core_is_noticed_and_so_is_its_leaving():
    borrowing = Borrowing(1)
    borrowing.offer((1,))
    steps(borrowing, 20, lambda count: 0.5 if count else 1.0)
    assert steps(borrowing, 10, lambda count: 3.0 if count else 1.0)[-1] == 0
    assert steps(borrowing, FIRST_RETRY + 10, lambda count: 0.5 if count else 1.0)[-1] == 1


@pytest.mark.parametrize("with_it", [0.5, 2.0])
def test_trying_again_becomes_rare(with_it):
    borrowing = Borrowing(1)
    borrowing.offer((1,))
    used = steps(borrowing, 10 * LAST_RETRY, lambda count: with_it if count else 1.0)
    worse = 0 if with_it < 1 else 1
    tried = [at for at, count in enumerate(used) if count == worse]
    assert len([at for at in tried if at > LAST_RETRY]) <= 10 * TRIES
    assert tried[-1] > 8 * LAST_RETRY  # but never ends


def test_kinds_of_steps_are_judged_apart():
    borrowing = Borrowing(1)
    borrowing.offer((1,))
    for _ in range(10):
        steps(borrowing, 1, lambda count: 2.0 if count else 1.0, num_rows=1)
        steps(borrowing, 1, lambda count: 60.0 if count else 100.0, num_rows=100)
        steps(borrowing, 1, lambda count: 70.0 if count else 120.0, num_rows=120)
    assert (len(borrowing.choose(1)), len(borrowing.choose(100)), len(borrowing.choose(128))) == (0, 1, 1)


def test_what_was_learnt_is_kept_for_the_same_cores_and_forgotten_for_others():
    borrowing = Borrowing(1)
    borrowing.offer((1,))
    steps(borrowing, 20, lambda count: 2.0 if count else 1.0)
    borrowing.offer(())
    borrowing.offer((1,))
    assert steps(borrowing, 5, lambda count: 2.0 if count else 1.0) == [0] * 5
    borrowing.offer((2,))
    used = steps(borrowing, 20, lambda count: 0.5 if count else 1.0)
    assert used == [1] * 20  # without is known already
