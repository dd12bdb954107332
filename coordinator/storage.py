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
from coremill.config.errors import ConfigError
from coremill.config.memory import default_arena_bytes, format_size, memory_budget
from coremill.config.tokens import end_of_generation_ids
from coremill.config.topology import CoreGroup
from coremill.native.arena import create_arena
from coremill.native.packfile import open_pack


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
            self.geometry = ArenaGeometry.for_model(
                spec, self._num_blocks(config, one_block.block_bytes, len(groups)), config.kv
            )
            self.arena_fd = create_arena(self.geometry)
        except BaseException:
            self.pack.close()
            raise

    def _num_blocks(self, config: EngineConfig, block_bytes: int, num_workers: int) -> int:
        longest = blocks_for(self.max_length)
        num_bytes = config.arena
        if num_bytes is None:
            num_bytes = default_arena_bytes(
                block_bytes=block_bytes,
                blocks_per_request=longest,
                num_active=num_workers * config.max_active,
                weight_bytes=self.pack.data_length,
                memory=memory_budget(),
            )
        elif num_bytes < block_bytes:
            raise ConfigError(
                f"arena is {format_size(num_bytes)}: it must hold at least one block of {format_size(block_bytes)}"
            )
        return num_bytes // block_bytes

    @property
    def geometry_fields(self) -> dict[str, Any]:
        return asdict(self.geometry)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end generation; from the whole vocabulary, which takes a while to read."""
        if self._stop_ids is not None:
            return tuple(self._stop_ids)
        return end_of_generation_ids(self.pack.tokenizer)

    def close(self) -> None:
        self.pack.close()
        os.close(self.arena_fd)
