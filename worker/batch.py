"""What one step of the engine is asked to do, and what it gives back.

A batch is filled straight into the arrays that C reads; they are kept from step to step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from coremill.config.arena import blocks_for


class SampleSpec(NamedTuple):
    """How to choose the token after a row.

    Attributes:
        temperature: 0 takes the most likely token (of equals, the lowest id); else > 0.
        top_p: in (0, 1]; the smallest set of most likely tokens with at least this share of what top_k left.
        top_k: 0 for all, else the number of most likely tokens to choose from.
        min_p: in [0, 1]; tokens less likely than this share of the most likely one are left out.
        seed: 64 bits. The draw depends on the seed, the position of the sampled token and the probabilities,
            on nothing else.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


class StepOutput(NamedTuple):
    """The token sampled for one sequence. status: "ok", or "nonfinite" (then token is -1)."""

    token: int
    status: str


class StepBatch:
    """The rows of one step: some new tokens of some sequences.

    Make it with `WorkerModel.new_batch()`; reuse it with `clear()`. `add` checks what it is given against
    the room of the batch, C checks the rest before it touches anything.
    """

    def __init__(self, max_step_tokens: int, max_sequences: int) -> None:
        from coremill.native import ffi

        self._ffi = ffi
        self.max_step_tokens = max_step_tokens
        self.max_sequences = max_sequences
        self.num_rows = 0
        self.num_sequences = 0
        self.num_samples = 0
        self._num_blocks = 0
        self._tokens = ffi.new("int32_t[]", max_step_tokens)
        self._seq_row = ffi.new("int32_t[]", max_sequences + 1)
        self._seq_pos = ffi.new("int32_t[]", max_sequences)
        self._block_begin = ffi.new("int32_t[]", max_sequences + 1)
        self._sampling = ffi.new("cm_sampling[]", max_sequences)
        self._blocks = ffi.new("int32_t[]", 1024)
        self._view = ffi.new("cm_batch *")

    def clear(self) -> None:
        self.num_rows = self.num_sequences = self.num_samples = self._num_blocks = 0

    @property
    def room(self) -> int:
        """Rows that can still be added; 0 as soon as no further sequence fits."""
        return self.max_step_tokens - self.num_rows if self.num_sequences < self.max_sequences else 0

    def add(
        self, tokens: Sequence[int], position: int, blocks: Sequence[int], sample: SampleSpec | None = None
    ) -> None:
        """Add consecutive tokens of one sequence.

        Args:
            tokens: at least one; the first lies at `position`, everything before is in the arena.
            blocks: the sequence's block table from position 0; at least up to the last of `tokens`.
            sample: when given, a token is sampled after the last row.

        Raises:
            ValueError: no room for the rows or for another sequence, or too few blocks.
        """
        count = len(tokens)
        needed = blocks_for(position + count)
        if not 0 < count <= self.room:
            raise ValueError(f"{count} tokens do not fit in a step with room for {self.room}")
        if position < 0 or len(blocks) < needed:
            raise ValueError(f"{len(blocks)} blocks for {count} tokens at {position}, which need {needed}")
        seq = self.num_sequences
        self._copy(self._tokens, self.num_rows, tokens, count)
        if self._num_blocks + needed > len(self._blocks):
            self._grow_blocks(self._num_blocks + needed)
        self._copy(self._blocks, self._num_blocks, blocks, needed)
        self._seq_row[seq] = self.num_rows
        self._seq_pos[seq] = position
        self._block_begin[seq] = self._num_blocks
        sampling = self._sampling[seq]
        if sample is None:
            sampling.wanted = 0
        else:
            sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed = sample
            sampling.wanted = 1
            self.num_samples += 1
        self.num_rows += count
        self._num_blocks += needed
        self.num_sequences = seq + 1

    def _copy(self, target: Any, begin: int, values: Sequence[int], count: int) -> None:
        if isinstance(values, array) and values.typecode == "i":
            self._ffi.memmove(target + begin, values, 4 * count)
        else:
            target[begin : begin + count] = values if len(values) == count else values[:count]

    def _grow_blocks(self, at_least: int) -> None:
        larger = self._ffi.new("int32_t[]", 2 * at_least)
        self._ffi.memmove(larger, self._blocks, 4 * self._num_blocks)
        self._blocks = larger

    def view(self, all_logits: bool = False) -> Any:
        """The `cm_batch *` of the present content; valid until the next `add` or `clear`."""
        self._seq_row[self.num_sequences] = self.num_rows
        self._block_begin[self.num_sequences] = self._num_blocks
        view = self._view
        view.num_rows = self.num_rows
        view.num_seqs = self.num_sequences
        view.tokens = self._tokens
        view.seq_row = self._seq_row
        view.seq_pos = self._seq_pos
        view.block_begin = self._block_begin
        view.blocks = self._blocks
        view.sampling = self._sampling
        view.all_logits = all_logits
        return view
