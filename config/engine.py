"""How an engine is run: one dataclass for the command line, the TOML file and Python alike."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from coremill.config.errors import ConfigError
from coremill.config.options import BY_NAME, default_of, of_group
from coremill.config.settings import Settings, from_keywords

# Longest request when neither the user nor a shorter model says otherwise.
DEFAULT_CTX = 4096


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. None means: decided from the machine and the model.

    Attributes (limits and defaults: config/options.py):
        workers: number of worker processes; None: one per core group.
        cores_per_worker: cores in each worker's group.
        max_active: sequences one worker steps together.
        ctx: longest request (prompt and completion) in tokens; None: min(model's context length, 4096).
        arena: bytes of KV cache for all sequences together.
        kv: KV cache type; "f16" or "q8".
        seed: run seed, from which rows without a seed of their own draw theirs.
        prefix_cache: share computed prefixes between sequences.
        lending: workers with nothing to run lend their cores to others, where that is faster.
        step_tokens: rows of one step, which is also the longest prefill chunk.
        profile: time each operation of a step.
        stuck_after: seconds after which a worker that has work and completes no operation is killed.

    ConfigError when a value is outside its limits.
    """

    workers: int | None = default_of("workers")
    cores_per_worker: int | None = default_of("cores_per_worker")
    max_active: int = default_of("max_active")
    ctx: int | None = default_of("ctx")
    arena: int | None = default_of("arena")
    kv: str = default_of("kv")
    seed: int = default_of("seed")
    prefix_cache: bool = default_of("prefix_cache")
    lending: bool = default_of("lending")
    step_tokens: int = default_of("step_tokens")
    profile: bool = default_of("profile")
    stuck_after: float = default_of("stuck_after")

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or BY_NAME[field.name].default is not None:
                BY_NAME[field.name].check(value, field.name)

    @classmethod
    def from_settings(cls, settings: Settings) -> EngineConfig:
        """The engine's part of a verb's settings; options the verb does not have keep their defaults."""
        return cls(**settings.of_group("engine"))

    @classmethod
    def from_keywords(cls, **options: Any) -> EngineConfig:
        """From Python: keywords, then COREMILL_ variables, then the file of `config=`, then defaults."""
        return cls.from_settings(from_keywords(of_group("engine"), options))

    def longest_request(self, context_length: int) -> int:
        """`ctx` for a model of this context length, in tokens. ConfigError when it is longer than that."""
        if self.ctx is None:
            return min(context_length, DEFAULT_CTX)
        if self.ctx > context_length:
            raise ConfigError(f"--ctx is {self.ctx}: the model's context length is {context_length} tokens")
        return self.ctx
