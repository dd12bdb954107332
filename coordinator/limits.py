"""What an engine can run at all; checked before anything is spent on a request."""

from __future__ import annotations

from dataclasses import dataclass

from coremill.config.errors import RequestError
from coremill.config.joboptions import MAX_PRIORITY
from coremill.config.request import SequenceRequest
from coremill.config.topology import CoreGroup


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes the scheduler plans with, in sequences, blocks and tokens.

    max_length: tokens of the longest request. vocab_size: token ids end before it.
    look_ahead: a block table is this much longer than its tokens, so that a worker never waits for Extend.
    urgent: with less room than this, and no free block, somebody must give way.
    prefix_cache: sequences share what they begin with.
    groups: the cores of each worker, which it lends while it has nothing to run; empty when nobody lends.
    """

    num_workers: int
    max_active: int
    num_blocks: int
    max_length: int
    vocab_size: int = 1 << 31
    block_tokens: int = 32
    look_ahead: int = 32
    urgent: int = 8
    prefix_cache: bool = True
    groups: tuple[CoreGroup, ...] = ()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)


def refusal(request: SequenceRequest, limits: Limits) -> RequestError | None:
    """Why the request can never run, or None."""
    if not request.prompt_ids:
        return RequestError("empty_prompt", "the prompt has no tokens; it needs at least 1", "prompt")
    worst = max(request.prompt_ids) if min(request.prompt_ids) >= 0 else min(request.prompt_ids)
    if not 0 <= worst < limits.vocab_size:
        text = f"the prompt has token id {worst}; ids of this model are 0 to {limits.vocab_size - 1}"
        return RequestError("invalid_value", text, "prompt")
    for name, low, high in _RANGES:
        value = getattr(request, name)
        if not low <= value <= high:
            return RequestError("invalid_value", f"{name} is {value}; it must lie between {low} and {high}", name)
    if not all(request.stop):
        return RequestError("invalid_value", "a stop string is empty; it needs at least 1 byte", "stop")
    return _too_long(request, limits)


_RANGES = (
    ("max_tokens", 1, 1 << 30),
    ("temperature", 0, 1e6),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("top_k", 0, (1 << 31) - 1),
    ("seed", 0, (1 << 64) - 1),
    ("priority", -MAX_PRIORITY, MAX_PRIORITY),
)


def _too_long(request: SequenceRequest, limits: Limits) -> RequestError | None:
    total = len(request.prompt_ids) + request.max_tokens
    asked = f"{len(request.prompt_ids)} prompt tokens and max_tokens {request.max_tokens} make {total} tokens"
    if total > limits.max_length:
        text = f"{asked}; the longest request is {limits.max_length} tokens (--ctx)"
        return RequestError("context_length_exceeded", text, "max_tokens")
    if limits.blocks_for(total - 1) > limits.num_blocks:  # the last token is never read
        text = f"{asked}; the whole KV cache holds {limits.num_blocks * limits.block_tokens} (--arena)"
        return RequestError("arena_too_small", text, "max_tokens")
    return None
