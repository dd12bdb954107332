"""How much of a run is left, from what has been counted so far.

Work is counted in prompt tokens; a new token costs as much as NEW_TOKEN_COST of them.

    rows not started    bring the mean prompt so far, and go on for the mean length: all new tokens by the number of
                        finished rows, so that rows still running count for what they have
    rows running        go on for the mean length or for as long as they have gone already, whichever is more: the
                        last ones are those that do not end soon
    the last rows       run on few slots: the time they take by themselves bounds the end, however fast many rows are

No row goes beyond the plan's mean of max_tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from coremill.coordinator.batch.plan import NEW_TOKEN_COST, Plan

# Before so much time has passed, nothing is said.
_MIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Count:
    """What a run has done. num_left: rows that are not finished, num_active of them running; num_finished: rows that
    ran to their end; prefill_tokens, decode_tokens: computed for all rows, finished_tokens of the latter for finished
    rows; decode_rate: new tokens per second lately."""

    seconds: float
    num_left: int
    num_active: int
    num_finished: int
    prefill_tokens: int
    decode_tokens: int
    finished_tokens: int
    decode_rate: float


def seconds_left(count: Count, plan: Plan | None) -> float | None:
    """None when too little has happened to tell."""
    if count.num_left <= 0:
        return 0.0
    started = count.num_finished + count.num_active
    done = count.prefill_tokens + NEW_TOKEN_COST * count.decode_tokens
    if plan is None or not plan.num_rows or not started or not done or count.seconds < _MIN_SECONDS:
        return None
    longest = plan.max_new_tokens / plan.num_rows
    mean = min(longest, count.decode_tokens / count.num_finished) if count.num_finished else longest
    active = min(count.num_active, count.num_left)
    so_far = max(0, count.decode_tokens - count.finished_tokens) / active if active else 0.0
    further = max(0.0, min(max(mean, so_far), longest - so_far))
    waiting = count.num_left - active
    work = waiting * (count.prefill_tokens / started + NEW_TOKEN_COST * mean) + NEW_TOKEN_COST * active * further
    tail = further * active / count.decode_rate if count.decode_rate else 0.0
    return max(work * count.seconds / done, tail)
