"""From settings to a model that can step."""

from __future__ import annotations

from collections.abc import Sequence

from coremill.config.arena import ArenaGeometry
from coremill.config.counters import CounterPage
from coremill.config.messages import Settings
from coremill.native.arena import map_arena
from coremill.native.packfile import open_pack
from coremill.worker.model import WorkerModel
from coremill.worker.sequences import max_step_rows


def load_packed_model(settings: Settings, counters: CounterPage) -> tuple[WorkerModel, Sequence[bytes]]:
    """The model of the pack, and the bytes of its tokens."""
    pack = open_pack(settings.pack)
    model = WorkerModel(
        pack,
        map_arena(settings.arena_fd, ArenaGeometry(**settings.arena)),
        max_step_tokens=max_step_rows(settings.step_tokens, settings.max_active),
        max_sequences=settings.max_active,
        threads=len(settings.cores),
        cores=settings.cores,
        progress=counters.words,
        profile=settings.profile,
    )
    return model, pack.token_bytes
