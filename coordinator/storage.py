"""What all workers of an engine share: the packed weights and the KV arena."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from coremill.config.arena import ArenaGeometry, blocks_for
from coremill.config.engine import EngineConfig
from coremill.config.errors import ModelError
from coremill.config.memory import MemoryNeed, memory_budget, plan_arena, worker_bytes
from coremill.config.tokens import end_of_generation_ids
from coremill.config.topology import CoreGroup
from coremill.native.arena import create_arena
from coremill.native.packfile import PackFile, open_pack


def streamed_bytes(pack: PackFile) -> int:
    """Bytes of weights that a step reads from end to end: all but a table of embeddings that is not the output
    matrix too, of which it reads one row for each token."""
    embedding = pack.matrices.get("token_embd")
    looked_up = embedding.nbytes if embedding is not None and not pack.spec.tied_output else 0
    return sum(matrix.nbytes for matrix in pack.matrices.values()) - looked_up


class Storage:
    """An open pack, and an arena for it.

    Args:
        stop_ids: tokens that end generation; None: those of the model.

    Attributes:
        max_length: tokens of the longest request.
        geometry: the arena's sizes; arena_fd: its memory.
    """

    def __init__(
        self,
        pack_path: str | Path,
        config: EngineConfig,
        groups: Sequence[CoreGroup],
        stop_ids: Sequence[int] | None = None,
    ) -> None:
        self._stop_ids = stop_ids
        self.pack = open_pack(pack_path)
        try:
            spec = self.pack.spec
            self.max_length = config.longest_request(spec.context_length)
            one_block = ArenaGeometry.for_model(spec, 1, config.kv)
            num_blocks = self._num_blocks(config, one_block.block_bytes, groups)
            self.geometry = ArenaGeometry.for_model(spec, num_blocks, config.kv)
            self.arena_fd = create_arena(self.geometry)
        except BaseException:
            self.pack.close()
            raise

    def _num_blocks(self, config: EngineConfig, block_bytes: int, groups: Sequence[CoreGroup]) -> int:
        threads = max(len(group.cores) for group in groups)
        need = MemoryNeed(
            weights=self.pack.data_length,
            per_worker=worker_bytes(
                self.pack.spec,
                step_rows=config.step_tokens + config.max_active,
                max_active=config.max_active,
                threads=threads,
            ),
            num_workers=len(groups),
            max_active=config.max_active,
            block_bytes=block_bytes,
            blocks_per_request=blocks_for(self.max_length),
            threads=threads,
        )
        return plan_arena(need, config.arena, memory_budget()) // block_bytes

    @cached_property
    def weight_bytes(self) -> int:
        """That a step reads; from all matrices, which are many to walk over for each glance."""
        return streamed_bytes(self.pack)

    @property
    def geometry_fields(self) -> dict[str, Any]:
        return asdict(self.geometry)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end generation; from the whole vocabulary, which takes a while to read."""
        if self._stop_ids is not None:
            return tuple(self._stop_ids)
        return end_of_generation_ids(self.pack.tokenizer)

    def pack_change(self) -> str | None:
        """What has been done to the pack's file since it was opened, in words, or None.

        Pages cut off under a mapping are SIGBUS to whoever reads them; a worker that starts now would map what lies
        at the path now.
        """
        then = self.pack.identity
        now = os.fstat(self.pack.fd)
        if now.st_size != then.size:
            return f"{self.pack.path}: the packed model was cut to {now.st_size} of {then.size} bytes during the run"
        if now.st_mtime_ns != then.mtime_ns:
            return f"{self.pack.path}: the packed model was written to during the run"
        try:
            there = os.stat(self.pack.path)
        except OSError:  # removed: those who have mapped it keep it
            return None
        if (there.st_dev, there.st_ino) != (then.device, then.inode) and not self._is_same_pack():
            return f"{self.pack.path}: the packed model was replaced by another during the run"
        return None

    def _is_same_pack(self) -> bool:
        """Whether the file at the path has our content. Another run may have packed the same model once more."""
        try:
            with open_pack(self.pack.path) as other:
                return other.key == self.pack.key
        except ModelError:
            return False

    def close(self) -> None:
        self.pack.close()
        os.close(self.arena_fd)
