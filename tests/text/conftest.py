"""Tokenizer descriptions of the two real models, and a tiny byte-level one for what real ones do not have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coremill.config.tokens import byte_alphabet
from coremill.coordinator.text.tokenizer import ModelTokenizer
from coremill.native.gguf import open_gguf

Description = dict[str, Any]


def _description(path: Path) -> Description:
    with open_gguf(path) as file:
        return {
            key: value.tolist() if hasattr(value, "tolist") else value
            for key, value in file.metadata.items()
            if key.startswith("tokenizer.")
        }


@pytest.fixture(scope="session")
def smollm2_description(smollm2_gguf: Path) -> Description:
    return _description(smollm2_gguf)


@pytest.fixture(scope="session")
def gemma3_description(gemma3_gguf: Path) -> Description:
    return _description(gemma3_gguf)


@pytest.fixture(scope="session")
def smollm2(smollm2_description: Description) -> ModelTokenizer:
    return ModelTokenizer.from_description(smollm2_description)


@pytest.fixture(scope="session")
def gemma3(gemma3_description: Description) -> ModelTokenizer:
    return ModelTokenizer.from_description(gemma3_description)


@pytest.fixture
def byte_level() -> Callable[..., Description]:
    """Makes a description of the 256 byte tokens, some control tokens (ids from 0), and extra tokens at the end.

    Merges are given as pairs; their results become tokens.
    """

    def make(
        controls: list[str] = ("<|bos|>", "<|end|>"),
        merges: list[str] = (),
        extra: list[tuple[str, int]] = (),
        **fields: Any,
    ) -> Description:
        texts = [*controls, *byte_alphabet(), *(merge.replace(" ", "") for merge in merges)]
        types = [3] * len(controls) + [1] * (len(texts) - len(controls))
        description = {
            "model": "gpt2",
            "pre": "gpt-2",
            "tokens": texts + [text for text, _ in extra],
            "token_type": types + [kind for _, kind in extra],
            "merges": list(merges),
            **fields,
        }
        return {"tokenizer.ggml." + key: value for key, value in description.items() if value is not None}

    return make
