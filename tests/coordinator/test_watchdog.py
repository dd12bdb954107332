"""Who is stuck, told by looks at a clock that tests move."""

from __future__ import annotations

from coremill.coordinator.watchdog import Watchdog


def looks(dog, times, signs=lambda now: (0,), factor=1.0):
    """(time, verdict) of each look at one worker."""
    return [(now, dog.look(now, {"w": (factor, signs(now))})) for now in times]


def first(verdicts, what):
    return next((now for now, verdict in verdicts if getattr(verdict, what)), None)


def test_asked_at_half_time_and_stuck_after_the_whole():
    verdicts = looks(Watchdog(10), range(100, 120))
    assert first(verdicts, "ask") == 105
    assert first(verdicts, "stuck") == 110
    assert sum(len(verdict.ask) for _, verdict in verdicts) == 1


def test_any_operation_or_answer_counts():
    verdicts = looks(Watchdog(10), range(100, 200), signs=lambda now: (now // 9,))
    assert first(verdicts, "stuck") is None


def test_loading_may_take_longer():
    assert first(looks(Watchdog(10), range(100, 200), factor=6), "stuck") == 160


def test_time_in_which_nobody_looked_does_not_count():
    dog = Watchdog(10)
    assert first(looks(dog, range(100, 105)), "ask") is None
    # Everything was stopped for an hour, which counts for two intervals.
    assert first(looks(dog, range(3700, 3704)), "stuck") is None
    # The machine is so busy that looks come rarely: the same.
    assert first(looks(dog, [3800, 3900, 4000]), "stuck") == 3800


def test_who_has_no_work_is_not_watched():
    dog = Watchdog(10)
    looks(dog, range(100, 109))
    assert dog.look(109, {}).stuck == []
    assert first(looks(dog, range(110, 119)), "stuck") is None


def test_short_patience_looks_more_often():
    dog = Watchdog(1)
    assert dog.interval == 0.125
    assert dog.due(5.0)
    dog.look(5.0, {})
    assert not dog.due(5.1)
    assert dog.due(5.2)
