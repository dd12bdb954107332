"""Where a token's keys and values lie in the KV arena.

arena = [block 0][block 1]...                    a block holds 32 consecutive tokens of one sequence
block = [layer 0][layer 1]...
layer = [KV head 0][KV head 1]...
head  = f16: [K tile [head_dim][32] f16][V tile [32][head_dim] f16]
        q8: [K codes][V codes], a byte each, [K scales [32] f16][V scales [32] f16] (native/isa/kv_store.inc)
"""

from __future__ import annotations

from dataclasses import dataclass

from coremill.config.errors import ConfigError
from coremill.config.model import ModelSpec

# Tokens in a block; the kernels walk attention in tiles of as many (native/src/kernels.h).
BLOCK_TOKENS = 32

# The arena is mapped with pages of this size where the kernel allows it.
HUGE_PAGE = 2 << 20

# Bytes of an element, and of the scale of a token's K or V; native/src/kv.c has the same, and binding compares.
_BYTES = {"f16": (2, 0), "q8": (1, 2)}
KV_TYPES = tuple(_BYTES)


def blocks_for(num_tokens: int) -> int:
    """Blocks that `num_tokens` consecutive tokens from position 0 need."""
    return -(-num_tokens // BLOCK_TOKENS)


def head_bytes(kv_type: str, head_dim: int) -> int:
    """Bytes that a block has for one KV head of one layer."""
    element, scale = _BYTES[kv_type]
    return 2 * BLOCK_TOKENS * (head_dim * element + scale)


@dataclass(frozen=True, slots=True)
class ArenaGeometry:
    """Sizes of an arena; both sides compute every address from it. All sizes in bytes are multiples of 64."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_tokens: int = BLOCK_TOKENS
    kv_type: str = "f16"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "num_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"arena: {name} is {getattr(self, name)}, not at least 1")
        if self.block_tokens != BLOCK_TOKENS:
            raise ConfigError(f"arena: block_tokens is {self.block_tokens}, not {BLOCK_TOKENS}")
        if self.kv_type not in KV_TYPES:
            raise ConfigError(f"arena: kv_type is {self.kv_type!r}; known: {', '.join(KV_TYPES)}")
        if self.num_blocks >= 1 << 31:
            raise ConfigError(f"arena: num_blocks is {self.num_blocks}, not below {1 << 31}")
        if self.total_bytes > 1 << 46:
            raise ConfigError(f"arena: {self.total_bytes} bytes are more than an address space holds")

    @classmethod
    def for_model(cls, spec: ModelSpec, num_blocks: int, kv_type: str = "f16") -> ArenaGeometry:
        return cls(spec.num_layers, spec.num_kv_heads, spec.head_dim, num_blocks, kv_type=kv_type)

    @property
    def head_bytes(self) -> int:
        return head_bytes(self.kv_type, self.head_dim)

    @property
    def layer_bytes(self) -> int:
        return self.head_bytes * self.num_kv_heads

    @property
    def block_bytes(self) -> int:
        return self.layer_bytes * self.num_layers

    @property
    def total_bytes(self) -> int:
        """Length of the shared memory: all blocks, rounded up to whole huge pages."""
        return -(-self.num_blocks * self.block_bytes // HUGE_PAGE) * HUGE_PAGE

    @property
    def token_bytes(self) -> int:
        """Arena bytes per token, for plans of memory."""
        return self.block_bytes // self.block_tokens
