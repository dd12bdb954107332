"""A model as a flat list of operations over named buffers.

An architecture (worker/architectures) fills a Plan once; worker/binding.py turns names into numbers for C,
which runs the list from first to last in every step (native/src/engine_ops.c). A plan prints as a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TOKENS, OUTPUTS = "tokens", "outputs"
ROWS, ACT = "rows", "act"

_EPILOGUES = {"add": "residual", "silu_glu": "silu(gate) * up", "gelu_glu": "gelu(gate) * up"}


@dataclass(frozen=True, slots=True)
class Buffer:
    """Rows of `width` floats, or packed activations (`kind` ACT) of as many inputs.

    `space` says what a row is: a token of the step, or an output, i.e. a token after which one is sampled.
    """

    name: str
    width: int
    kind: str = ROWS
    space: str = TOKENS


@dataclass(frozen=True, slots=True)
class Op:
    """One operation; what each kind reads and writes is said in native/abi.inc (CM_OP_*).

    Attributes:
        label: name in tables and profiles, e.g. "3.attn_qkv".
        kind: lower-case name of the CM_OP_ number.
        dst, src: buffer names.
        matrix, bias, vector: packed names.
        epilogue: "store", "add", "silu_glu" or "gelu_glu".
        columns, heads: parts of a fused row and the heads in each.
        factor: epsilon of a norm, scale of attention scores or embeddings.
        rope: table of rotary positions, 0 or 1. window: positions that attention sees, 0 for all.
    """

    label: str
    kind: str
    dst: str | None = None
    src: str | None = None
    matrix: str | None = None
    bias: str | None = None
    vector: str | None = None
    epilogue: str = "store"
    layer: int = -1
    columns: tuple[int, int] = (0, 0)
    heads: tuple[int, int] = (0, 0)
    factor: float = 1.0
    rope: int = 0
    window: int = 0

    @property
    def detail(self) -> str:
        """Everything but label, kind and buffers, in words."""
        parts = [name for name in (self.matrix, self.vector) if name]
        if self.bias:
            parts.append(f"+ {self.bias}")
        if self.epilogue != "store":
            parts.append(_EPILOGUES[self.epilogue])
        if any(self.heads):
            parts.append(f"heads {'+'.join(str(h) for h in self.heads if h)}")
        if self.rope:
            parts.append("local positions")
        if self.window:
            parts.append(f"window {self.window}")
        return ", ".join(parts)


@dataclass(slots=True)
class Plan:
    """Buffers and operations, in order of their making."""

    buffers: dict[str, Buffer] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)

    def buffer(self, name: str, width: int, kind: str = ROWS, space: str = TOKENS) -> str:
        """Declare a buffer and return its name; a second declaration must be the same."""
        made = Buffer(name, width, kind, space)
        if self.buffers.setdefault(name, made) != made:
            raise ValueError(f"buffer {name!r} is declared as {self.buffers[name]} and as {made}")
        return name

    def add(self, label: str, kind: str, **fields: object) -> None:
        op = Op(label, kind, **fields)
        for name in (op.dst, op.src):
            if name is not None and name not in self.buffers:
                raise ValueError(f"operation {label!r} uses buffer {name!r}, which is not declared")
        self.ops.append(op)

    def matrices(self) -> list[str]:
        """Packed matrices in order of first use."""
        return list(dict.fromkeys(op.matrix for op in self.ops if op.matrix))

    def vectors(self) -> list[str]:
        """Packed vectors in order of first use."""
        return list(dict.fromkeys(name for op in self.ops for name in (op.vector, op.bias) if name))

    def __str__(self) -> str:
        rows = [("#", "operation", "kind", "from", "to", "with")]
        rows += [
            (str(i), op.label, op.kind, self._show(op.src), self._show(op.dst), op.detail)
            for i, op in enumerate(self.ops)
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _show(self, name: str | None) -> str:
        if name is None:
            return "-"
        buffer = self.buffers[name]
        return f"{name}[{buffer.space}][{buffer.width}]{' packed' if buffer.kind == ACT else ''}"
