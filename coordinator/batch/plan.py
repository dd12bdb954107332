"""What a run is about to do, from its first rows: how many, how long, what they share, what it will take.

The window ends with PLAN_ROWS rows, the input, or PLAN_SECONDS after its first row, whatever comes first; rows
run meanwhile. Over more rows than that, figures are estimates and are called so.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

from coremill.config.errors import RequestError
from coremill.config.request import SequenceRequest

PLAN_ROWS = 1024
PLAN_SECONDS = 0.25
# A generated token takes about as long as this many prompt tokens: fewer of them share a pass over the weights.
NEW_TOKEN_COST = 2.5


@dataclass(frozen=True, slots=True)
class Plan:
    """Figures of the window. num_read: lines read so far, rows of earlier runs included; whole: they are all.

    prompt_tokens, max_new_tokens, shared_tokens (prompt tokens that repeat another row's beginning): of
    num_rows rows that fit the context. num_unfit: rows of the window that exceed the context; num_unfit_arena: rows
    among num_rows that exceed the KV cache; num_unlimited: chats without max_tokens, which may fill the context.
    """

    num_read: int
    whole: bool
    num_rows: int
    num_unfit: int
    prompt_tokens: int
    max_new_tokens: int
    shared_tokens: int
    num_unfit_arena: int = 0
    num_unlimited: int = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """What the run has at its disposal; the part of the plan that does not depend on rows.

    groups: (cores, why) of each worker. memory: (what, bytes). multiplies: per token, of all matrices;
    rate: multiplies per second that all cores together are expected to reach, None when nobody knows;
    arena: bytes of the KV cache; kv_block: (tokens, bytes) of a piece of it, which one row fills.
    sharing: what rows have in common is computed once (--prefix-cache). continued: lines of text are continued, by a
    model that could answer them, and nobody has said that this is meant.
    """

    groups: tuple[tuple[tuple[int, ...], str], ...] = ()
    memory: tuple[tuple[str, int], ...] = ()
    ctx: int = 0
    multiplies: int = 0
    rate: float | None = None
    arena: int = 0
    kv_block: tuple[int, int] = (32, 0)
    sharing: bool = True
    continued: bool = False


class PlanWindow:
    """Collects the rows of the window. Used by one thread."""

    def __init__(self) -> None:
        self._prompts: list[tuple[int, ...]] = []
        self._max_new = self._unfit = self._unfit_arena = self._unlimited = 0
        self._deadline: float | None = None
        self._done = False

    def seconds_left(self) -> float | None:
        """How long to wait for another row before the plan is due; None: forever."""
        if self._done or self._deadline is None:
            return None
        return max(0.0, self._deadline - time.monotonic())

    def add(self, sequence: SequenceRequest, *, fits: bool = True, unlimited: bool = False) -> None:
        """fits: the KV cache has room for it; unlimited: nobody said how long it may get."""
        if self._note_row():
            self._unfit_arena += not fits
            self._unlimited += unlimited
            self._prompts.append(sequence.prompt_ids)
            self._max_new += sequence.max_tokens

    def add_unfit(self, error: RequestError) -> None:
        if self._note_row():
            self._unfit += error.code == "context_length_exceeded"

    def finish(self, num_read: int, ended: bool) -> Plan | None:
        """The plan, once: as soon as the window has ended."""
        if self._done:
            return None
        late = self._deadline is not None and time.monotonic() >= self._deadline
        if not (ended or late or len(self._prompts) >= PLAN_ROWS):
            return None
        self._done = True
        plan = Plan(
            num_read=num_read,
            whole=ended,
            num_rows=len(self._prompts),
            num_unfit=self._unfit,
            prompt_tokens=sum(map(len, self._prompts)),
            max_new_tokens=self._max_new,
            shared_tokens=shared_tokens(self._prompts),
            num_unfit_arena=self._unfit_arena,
            num_unlimited=self._unlimited,
        )
        self._prompts = []
        return plan

    def _note_row(self) -> bool:
        if not self._done and self._deadline is None:
            self._deadline = time.monotonic() + PLAN_SECONDS
        return not self._done


def shared_tokens(prompts: list[tuple[int, ...]]) -> int:
    """Prompt tokens that would not have to be computed if every common prefix were computed once: all tokens
    less the nodes of their tree. Neighbours in sorted order share the longest prefixes."""
    ordered = sorted(prompts)
    return sum(_common_length(one, two) for one, two in itertools.pairwise(ordered))


def _common_length(one: tuple[int, ...], two: tuple[int, ...]) -> int:
    low, high = 0, min(len(one), len(two))
    while low < high:  # one[:low] == two[:low] always holds
        middle = (low + high + 1) // 2
        if one[low:middle] == two[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def estimate_seconds(plan: Plan, setting: Setting, num_rows: int) -> float | None:
    """For `num_rows` rows like those of the window, if every row uses its max_tokens."""
    if not plan.num_rows or not setting.rate:
        return None
    prompt_tokens = plan.prompt_tokens - (plan.shared_tokens if setting.sharing else 0)
    tokens = (prompt_tokens + NEW_TOKEN_COST * plan.max_new_tokens) / plan.num_rows * num_rows
    return tokens * setting.multiplies / setting.rate


def plan_lines(plan: Plan, setting: Setting, num_rows: int | None, num_skipped: int, format_note: str) -> list[str]:
    """The plan for people. num_rows: rows of the whole input, estimated unless plan.whole; None: a pipe."""
    from coremill.config.memory import format_size

    rows = count_of(plan.num_read, "row")
    if not plan.whole:
        rows = "unknown number of rows" if num_rows is None else f"about {num_rows:,} rows"
    lines = [f"input: {rows}, {format_note}"]
    if num_skipped:
        lines[0] += f"; {num_skipped:,} of those read so far are finished already"
    over = "" if plan.whole else f" (over the first {count_of(plan.num_rows + plan.num_unfit, 'row')})"
    if plan.num_rows:
        lines.append(f"tokens: {plan.prompt_tokens:,} in prompts, at most {plan.max_new_tokens:,} to generate{over}")
    if plan.shared_tokens:
        share = plan.shared_tokens / plan.prompt_tokens
        lines[-1] += (
            f"; {plan.shared_tokens:,} prompt tokens ({share:.0%}) repeat another "
            f"row's beginning and are {'computed once' if setting.sharing else 'computed again (--no-prefix-cache)'}"
        )
    lines += _warning_lines(plan, setting, over)
    if setting.memory:
        parts = list(setting.memory)
        if setting.arena and plan.num_rows:
            parts.append(("KV cache, as it fills, at most", _kv_bytes(plan, setting)))
        lines.append("memory: " + ", ".join(f"{what} {format_size(size)}" for what, size in parts))
    lines += _group_lines(setting.groups)
    left = plan.num_rows if plan.whole else num_rows and max(0, num_rows - num_skipped)
    seconds = estimate_seconds(plan, setting, left) if left else None
    if seconds is not None:
        lines.append(f"estimate: about {format_seconds(seconds)} if every row uses all its tokens")
    return lines


def _kv_bytes(plan: Plan, setting: Setting) -> int:
    """The whole arena, or what all rows together would fill, if that is less."""
    block_tokens, block_bytes = setting.kv_block
    if not plan.whole:
        return setting.arena
    num_blocks = plan.num_rows + (plan.prompt_tokens + plan.max_new_tokens) // block_tokens
    return min(setting.arena, num_blocks * block_bytes)


def _warning_lines(plan: Plan, setting: Setting, over: str) -> list[str]:
    """What will go otherwise than people expect; nothing for most runs."""
    from coremill.config.memory import format_size

    lines = []
    if setting.continued:
        lines.append(
            "hint: each line is a text that the model continues; --chat makes it a message that it answers (--no-chat "
            "if you mean to continue)"
        )
    if plan.num_unfit:
        lines.append(f"warning: {count_of(plan.num_unfit, 'row')} too long for --ctx {setting.ctx:,}{over}")
    if plan.num_unfit_arena:
        rows, arena = count_of(plan.num_unfit_arena, "row"), format_size(setting.arena)
        lines.append(f"warning: {rows} too long for --arena {arena}{over}: give it more, or the rows less max_tokens")
    if plan.num_unlimited:
        lines.append(
            f"warning: {count_of(plan.num_unlimited, 'chat')} without max_tokens{over}: each goes on until the model "
            f"ends it or --ctx {setting.ctx:,} is full; --max-tokens sets a limit"
        )
    return lines


def count_of(num: int, what: str) -> str:
    """1, "row" -> "1 row"; 2000, "row" -> "2,000 rows"."""
    return f"{num:,} {what}" if num == 1 else f"{num:,} {what}s"


def _group_lines(groups: tuple[tuple[tuple[int, ...], str], ...]) -> list[str]:
    """Workers with one reason share a line."""
    by_why: dict[str, list[tuple[int, ...]]] = {}
    for cores, why in groups:
        by_why.setdefault(why, []).append(cores)
    lines = []
    for why, cores in by_why.items():
        if len(cores) > 1:  # "one physical core, NUMA node 0" of each
            what, comma, rest = why.partition(", ")
            why = f"{what} each{comma}{rest}" if what else ""
        line = f"workers: {len(cores)} on cores {', '.join('+'.join(map(str, group)) for group in cores)}"
        lines.append(f"{line} ({why})" if why else line)
    return lines


def format_seconds(seconds: float) -> str:
    """7.3 -> "7.3 s", 150 -> "2 min 30 s", 7300 -> "2 h 2 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def stats_plan(plan: Plan | None) -> dict[str, Any] | None:
    """The plan as it stands in the statistics."""
    if plan is None:
        return None
    return {
        "rows": plan.num_rows,
        "unfit_rows": plan.num_unfit + plan.num_unfit_arena,
        "prompt_tokens": plan.prompt_tokens,
        "max_new_tokens": plan.max_new_tokens,
        "shared_prefix_tokens": plan.shared_tokens,
        "whole_input": plan.whole,
    }
