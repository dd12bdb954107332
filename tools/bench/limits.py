"""How long each operation of a step must take at least on this machine: the yardstick of `coremill bench`.

An operation's limit is the larger of its arithmetic and its memory traffic, each at the best rate measured here:

    matrix product   multiply-adds at the rate of its format's own kernel, weights and activations hot in L1;
                     weights at the rate of streaming memory
    attention        float multiply-adds at the bare FMA rate, with q8 those of bare 8-bit dots; keys and values at
                     the rate of streaming memory
    row operations   bytes read and written at the rate of the L2 cache
    sampling, tables nothing

A step's limit is the sum of its operations' limits: nothing overlaps between two operations on one core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from coremill.config.arena import BLOCK_TOKENS, head_bytes
from coremill.config.formats import FORMATS, PANEL_ROWS
from coremill.tools.machine import Ceilings, bandwidth, on_cores

if TYPE_CHECKING:
    from coremill.native.packfile import PackedMatrix, PackFile
    from coremill.worker.plan import Op, Plan

# Products this small stay in L1 with everything they touch. A longer k has less work at its ends, a shorter one
# leaves more room in L1: the better of both is the kernel's rate.
_HOT_N, _HOT_KS = 128, (512, 1536)
# Tokens with which a kernel's full tiles are in use; which is best depends on the tile.
_FULL_TOKENS = (8, 12, 16)
_L2_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step is asked to do. spans: for each sequence (its rows in the step, its length after them)."""

    spans: tuple[tuple[int, int], ...]
    num_outputs: int

    @property
    def num_rows(self) -> int:
        return sum(rows for rows, _ in self.spans)


def decode_shape(num_sequences: int, context: int) -> StepShape:
    """One row for each sequence, at position `context`."""
    return StepShape(((1, context + 1),) * num_sequences, num_sequences)


def prefill_shapes(num_tokens: int, step_tokens: int) -> list[StepShape]:
    """The steps of one prompt; a token is sampled after the last."""
    ends = [*range(step_tokens, num_tokens, step_tokens), num_tokens]
    begins = [0, *ends[:-1]]
    return [StepShape(((end - begin, end),), int(end == num_tokens)) for begin, end in zip(begins, ends, strict=True)]


def format_rows(matrix: PackedMatrix) -> dict[int, int]:
    """Rows (padded to panels) of each format in a matrix."""
    rows: dict[int, int] = {}
    for (_, _, num_rows), type_id in zip(matrix.parts, matrix.formats, strict=True):
        rows[type_id] = rows.get(type_id, 0) + -(-num_rows // PANEL_ROWS) * PANEL_ROWS
    return rows


@dataclass(slots=True)
class GemmRates:
    """Multiply-adds per second of products on one pinned core; what was measured is remembered.

    Attributes:
        core: where; isa: number of the instruction set; seconds: spent on each measurement.
    """

    core: int
    isa: int
    seconds: float = 0.02
    _hot: dict[tuple[int, int], float] = field(default_factory=dict)

    def hot(self, type_id: int, num_tokens: int) -> float:
        """A format's own kernel with everything in L1, for that many tokens."""
        counts = _FULL_TOKENS if num_tokens >= _FULL_TOKENS[0] else (num_tokens,)
        key = (type_id, counts[0])
        if key not in self._hot:
            tried = [(k, count) for k in _HOT_KS for count in counts]
            self._hot[key] = max(self.measure(type_id, _HOT_N, k, count, hot=True) for k, count in tried)
        return self._hot[key]

    def measure(self, type_id: int, n: int, k: int, num_tokens: int, *, hot: bool = False) -> float:
        """The best of as many products as fit the time."""
        from coremill.config.errors import UnsupportedHostError
        from coremill.native import lib

        macs = n * k * num_tokens

        def run() -> float:
            once = lib.cm_bench_gemm(self.isa, type_id, n, k, num_tokens, hot, 1, 1)
            passes = max(3, min(5000, int(self.seconds / once))) if once > 0 else 1
            return lib.cm_bench_gemm(self.isa, type_id, n, k, num_tokens, hot, passes, 1)

        seconds = on_cores([self.core], run)[0]
        if seconds <= 0:
            name = FORMATS[type_id].name
            raise UnsupportedHostError(f"bench: a product of {n} x {k} {name} weights cannot be measured here")
        return macs / seconds

    def matrix(self, matrix: PackedMatrix, num_tokens: int) -> float:
        """A whole matrix, part by part, its weights distinct but warm as far as the caches hold them."""
        rows = format_rows(matrix)
        seconds = sum(
            n * matrix.k * num_tokens / self.measure(type_id, n, matrix.k, num_tokens) for type_id, n in rows.items()
        )
        return sum(rows.values()) * matrix.k * num_tokens / seconds

    def matrix_limit(self, matrix: PackedMatrix, num_tokens: int) -> float:
        """Seconds of the arithmetic of a matrix at its formats' hot rates."""
        return sum(
            n * matrix.k * num_tokens / self.hot(type_id, num_tokens) for type_id, n in format_rows(matrix).items()
        )


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of a model's operations on one core.

    Attributes:
        read: bytes per second that this core gets when streaming as many bytes as the model's weights.
        l2: the same for bytes that stay in L2.
        attention: multiply-adds per second of attention's kind, floats or 8-bit integers.
        kv: type of the KV cache.
        busy: the share of its own best rate that arithmetic keeps while the other cores compute too.
    """

    pack: PackFile
    plan: Plan
    gemm: GemmRates
    read: float
    l2: float
    attention: float
    kv: str = "f16"
    busy: float = 1.0

    @classmethod
    def measured(
        cls, pack: PackFile, plan: Plan, gemm: GemmRates, ceilings: Ceilings, seconds: float, kv: str
    ) -> StepLimits:
        """Limits of a core that has the machine to itself."""
        weights = -(-pack.data_length >> 20) << 20
        read, _ = bandwidth([gemm.core], min(weights, 1 << 30), seconds)
        l2, _ = bandwidth([gemm.core], _L2_BYTES, seconds / 4)
        attention = ceilings.fma_macs_one if kv == "f16" else ceilings.dot_macs_one
        return cls(pack, plan, gemm, read, l2, attention, kv)

    def with_all_busy(self, ceilings: Ceilings, seconds: float) -> StepLimits:
        """Limits of each core while all work on the same kind of step."""
        weights = -(-self.pack.data_length >> 20) << 20
        num_cores = len(ceilings.cores)
        read, _ = bandwidth(ceilings.cores, min(weights, (8 << 30) // num_cores >> 12 << 12), seconds)
        busy = min(1.0, sum(ceilings.dot_macs) / num_cores / ceilings.dot_macs_one)
        return replace(self, read=read / num_cores, busy=busy)

    def seconds(self, op: Op, shape: StepShape) -> float:
        """The least time of one operation of a step."""
        rows = shape.num_rows
        if op.kind in ("gemm", "head"):
            return self._product(op, shape.num_outputs if op.kind == "head" else rows)
        if op.kind == "attention":
            return self._attention(op, shape.spans)
        return self._row_bytes(op, rows, shape.num_outputs) / self.l2

    def step_seconds(self, shape: StepShape) -> float:
        """The sum over the plan."""
        return sum(self.seconds(op, shape) for op in self.plan.ops)

    def _product(self, op: Op, num_tokens: int) -> float:
        if num_tokens == 0:
            return 0.0
        matrix = self.pack.matrices[op.matrix]
        return max(self.gemm.matrix_limit(matrix, num_tokens) / self.busy, matrix.nbytes / self.read)

    def _attention(self, op: Op, spans: Sequence[tuple[int, int]]) -> float:
        spec = self.pack.spec
        # Row i of a span sees everything up to itself; each seen token costs a multiply-add per element for the
        # score and one for the sum.
        seen = sum(rows * end - rows * (rows - 1) // 2 for rows, end in spans)
        macs = 2 * seen * op.heads[0] * spec.head_dim
        block = spec.num_kv_heads * head_bytes(self.kv, spec.head_dim)
        num_bytes = sum(end for _, end in spans) * block / BLOCK_TOKENS
        return max(macs / (self.attention * self.busy), num_bytes / self.read)

    def _row_bytes(self, op: Op, rows: int, outputs: int) -> float:
        spec, buffers = self.pack.spec, self.plan.buffers
        width = buffers[op.dst].width if op.dst else 0
        if op.kind == "embed":
            return rows * width * 5  # less than a byte of weights, 4 of floats
        if op.kind == "rmsnorm":
            return (outputs if buffers[op.dst].space == "outputs" else rows) * width * 8
        if op.kind == "act_pack":
            return (outputs if buffers[op.dst].space == "outputs" else rows) * width * 5.5
        if op.kind == "rope":
            return rows * sum(op.heads) * spec.head_dim * 8
        if op.kind == "kv_store":
            return rows * spec.num_kv_heads * spec.head_dim * 2 * 6
        if op.kind == "gather_out":
            return outputs * width * 8
        return 0.0
