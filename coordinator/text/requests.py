"""What is asked of the text side and what comes back. Light: the coordinator imports it, not the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TextRequest:
    """Exactly one of messages (a chat) and prompt (text, or token ids as they are).

    add_generation_prompt: end a chat where the assistant begins to write. allow_special: the request's own texts may
    spell control tokens. template: Jinja source used instead of the model's. variables: further template variables
    (tools, documents, ...).
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | Sequence[int] | None = None
    add_generation_prompt: bool = True
    allow_special: bool = False
    template: str | None = None
    variables: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt as the engine takes it."""

    ids: tuple[int, ...]
