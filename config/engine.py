"""How an engine is run: one dataclass for the command line, the TOML file and Python alike."""

from __future__ import annotations

from dataclasses import dataclass

from coremill.config.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. None means: decided from the machine and the model.

    Attributes:
        workers: number of worker processes; None: one per core group.
        cores_per_worker: cores in each worker's group.
        max_active: sequences one worker steps together.
        ctx: longest request (prompt and completion) in tokens; None: min(model's context length, 4096).
        arena: bytes of KV cache for all sequences together.
        kv: KV cache type; "f16".
        seed: run seed, from which rows without a seed of their own draw theirs.
        prefix_cache: share computed prefixes between sequences.
        step_tokens: rows of one step, which is also the longest prefill chunk.
        profile: time each operation of a step.
    """

    workers: int | None = None
    cores_per_worker: int | None = None
    max_active: int = 16
    ctx: int | None = None
    arena: int | None = None
    kv: str = "f16"
    seed: int = 0
    prefix_cache: bool = True
    step_tokens: int = 128
    profile: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("workers", 1, 4096),
            ("cores_per_worker", 1, 4096),
            ("max_active", 1, 1024),
            ("ctx", 2, 1 << 30),
            ("arena", 1, 1 << 60),
            ("step_tokens", 1, 8192),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} is {value}: it must lie between {low} and {high}")
        if self.kv != "f16":
            raise ConfigError(f"kv is {self.kv!r}: only 'f16' is supported")
