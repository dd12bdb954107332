"""The model as the worker's loop sees it: batches in, tokens out. One call into C per step; no numpy here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from coremill.config.errors import EngineError
from coremill.worker.batch import SampleSpec, StepBatch, StepOutput

if TYPE_CHECKING:
    from coremill.native.arena import ArenaMap
    from coremill.native.packfile import PackFile
    from coremill.worker.plan import Plan

__all__ = ["OpProfile", "SampleSpec", "StepBatch", "StepOutput", "WorkerModel"]

_STATUS = ("ok", "nonfinite")


class OpProfile(NamedTuple):
    """Time of one operation over all steps since the model was made, its final barrier included."""

    label: str
    kind: str
    calls: int
    seconds: float


class WorkerModel:
    """A packed model bound to an arena, ready to step.

    Args:
        pack: an open pack file; its data region is mapped read-only, shared with every other process.
        arena: the mapped KV arena.
        max_step_tokens: most rows of a step.
        max_sequences: most sequences of a step.
        threads: threads that run a step, the caller included.
        cores: cores to pin the helper threads to (`cores[1:]`); empty pins none. The caller pins itself.
        progress: writable uint64 words in shared memory; C bumps the first at every operation.
        profile: time every operation.
        all_logits: also allow `logits_step`, which needs scratch for the logits of every row.

    A step's rows get the same tokens whatever else is in the batch, however a prompt is cut into steps, and
    whatever `threads` is. Not thread-safe; one step at a time.
    """

    def __init__(
        self,
        pack: PackFile,
        arena: ArenaMap,
        *,
        max_step_tokens: int = 128,
        max_sequences: int = 16,
        threads: int = 1,
        cores: Sequence[int] = (),
        progress: memoryview | None = None,
        profile: bool = False,
        all_logits: bool = False,
    ) -> None:
        from coremill.native import ffi, lib
        from coremill.worker.architectures import describe
        from coremill.worker.binding import bind

        self.spec = pack.spec
        self.max_step_tokens = max_step_tokens
        self.max_sequences = max_sequences
        self.plan: Plan = describe(pack)
        self._ffi, self._lib = ffi, lib
        self._bound = bind(
            pack,
            self.plan,
            arena,
            max_step_tokens=max_step_tokens,
            max_sequences=max_sequences,
            threads=threads,
            cores=cores,
            progress=progress,
            profile=profile,
            all_logits=all_logits,
        )
        self._engine = self._bound.engine
        self._isa = ffi.string(lib.cm_isa_active()).decode()
        self._results = ffi.new("cm_step_result[]", max_sequences)
        self._err = ffi.new("char[]", 512)

    def new_batch(self) -> StepBatch:
        return StepBatch(self.max_step_tokens, self.max_sequences)

    def step(self, batch: StepBatch) -> list[StepOutput]:
        """Run the batch: new keys and values go to the arena, one output per sequence with a sample, in `add` order.

        Raises:
            EngineError: the batch is invalid (a token id, position, block id or sampling value out of range);
                nothing was computed.
        """
        self._run(batch, all_logits=False)
        return self.samples(batch)

    def samples(self, batch: StepBatch) -> list[StepOutput]:
        """Outputs of the last step, which ran this batch; `step` returns them itself."""
        results = self._results
        return [StepOutput(results[i].token, _STATUS[results[i].status]) for i in range(batch.num_samples)]

    def logits_step(self, batch: StepBatch) -> Any:
        """Run the batch and return a buffer of float32 [rows][vocab_size], valid until the next step.

        Needs `all_logits=True`. The batch's samples are taken too; `samples` returns them.
        """
        self._run(batch, all_logits=True)
        stride = self._ffi.new("size_t *")
        rows = self._lib.cm_engine_logits(self._engine, stride)
        if stride[0] != self.spec.vocab_size:
            raise EngineError(f"logits rows of {stride[0]} floats, expected {self.spec.vocab_size}")
        return self._ffi.buffer(rows, batch.num_rows * self.spec.vocab_size * 4)

    def _run(self, batch: StepBatch, *, all_logits: bool) -> None:
        err = self._err
        if self._lib.cm_engine_step(self._engine, batch.view(all_logits), self._results, err, len(err)) < 0:
            raise EngineError(f"step refused: {self._ffi.string(err).decode(errors='replace')}")

    def copy_block(self, source: int, target: int, num_tokens: int) -> None:
        """Make the first num_tokens tokens of arena block `target` those of `source`, and its others zero.

        Raises:
            EngineError: no such blocks, or the same one twice; nothing was copied.
        """
        err = self._err
        if self._lib.cm_engine_copy_block(self._engine, source, target, num_tokens, err, len(err)) < 0:
            raise EngineError(f"copy refused: {self._ffi.string(err).decode(errors='replace')}")

    def borrow(self, cores: Sequence[int]) -> None:
        """Let a thread on each of these cores take part in every step from now on; none of them ends that.

        Threads are started when first wanted, and sleep while they are not. Tokens do not depend on it.

        Raises:
            EngineError: the kernel refuses threads there, or memory for them; steps use the own threads alone.
        """
        err = self._err
        if self._lib.cm_engine_borrow(self._engine, list(cores), len(cores), err, len(err)) < 0:
            raise EngineError(f"borrowing refused: {self._ffi.string(err).decode(errors='replace')}")

    @property
    def isa(self) -> str:
        """Name of the instruction set whose kernels run."""
        return self._isa

    @property
    def scratch_bytes(self) -> int:
        """Anonymous memory the engine holds beside the weights and the arena."""
        return self._lib.cm_engine_scratch_bytes(self._engine)

    def op_table(self) -> str:
        """The plan as a table for people."""
        return str(self.plan)

    def profile(self) -> list[OpProfile]:
        """Times per operation in plan order; empty unless made with `profile=True`."""
        count = len(self.plan.ops)
        seconds = self._ffi.new("double[]", count)
        calls = self._ffi.new("uint64_t[]", count)
        if not self._lib.cm_engine_profile(self._engine, seconds, calls):
            return []
        return [OpProfile(op.label, op.kind, calls[i], seconds[i]) for i, op in enumerate(self.plan.ops)]

    def close(self) -> None:
        """Stop the helper threads and free the scratch; the model cannot be used afterwards."""
        self._bound.close()
