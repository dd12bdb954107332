"""Facts about a vocabulary that both sides need: token types, control and end-of-generation ids, byte alphabets.

A tokenizer description is the raw `tokenizer.*` metadata of a GGUF file: a dict whose keys keep their
full names. Nothing here loads a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from coremill.config.errors import ModelError, UnsupportedModelError

# `tokenizer.ggml.token_type` values (GGUF specification).
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
_TYPES = frozenset({NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE})
# What files have as the id of a token that they do not have: -1.
_NO_ID = (-1, 2**32 - 1)

# Spellings of control tokens that end a turn or a text. A model that names only one of them as its
# `eos_token_id` may still generate another (base models tuned for chat often do).
END_MARKERS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|end_of_turn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|endofturn|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|eot|>",
        "<|eos|>",
        "<eos>",
        "</s>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "[|endofturn|]",
        "<turn|>",
        "[e~[",
        "<｜end▁of▁sentence｜>",
    }
)

_PREFIX = "tokenizer.ggml."


# Fields of a description and the Python types their values (or the values in them) may have.
_LISTS = {"tokens": (str,), "token_type": (int,), "merges": (str,), "scores": (float, int)}
_FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix")
_VALUES = {"model": (str,), "pre": (str,), **{name: (bool,) for name in _FLAGS}}
_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")


def check_description(description: Mapping[str, Any]) -> None:
    """ModelError naming the first field whose value is wrong or not supported: anybody can write a model file."""
    for name, types in _LISTS.items():
        value = description.get(_PREFIX + name)
        if value is None:
            continue
        if not isinstance(value, (list, tuple)) or not set(map(type, value)) <= set(types):
            raise ModelError(f"{_PREFIX}{name}: must be a list of {types[0].__name__}")
    values = _VALUES | {f"{name}_token_id": (int,) for name in _IDS}
    for name, types in values.items():
        value = description.get(_PREFIX + name)
        if value is not None and type(value) not in types:
            raise ModelError(f"{_PREFIX}{name}: {value!r} is not of type {types[0].__name__}")
    if not isinstance(description.get("tokenizer.chat_template", ""), str):
        raise ModelError("tokenizer.chat_template: must be text")
    if description.get(_PREFIX + "add_eos_token"):
        raise UnsupportedModelError(
            "tokenizer.ggml.add_eos_token is true: a prompt that ends with the end of text has no continuation"
        )
    unknown = set(description.get(_PREFIX + "token_type") or ()) - _TYPES
    if unknown:
        raise ModelError(f"{_PREFIX}token_type: there is no type {min(unknown)}; types go from {NORMAL} to {BYTE}")
    if description.get(_PREFIX + "tokens"):
        for name in _IDS:
            special_id(description, name)


def vocabulary(description: Mapping[str, Any]) -> Sequence[str]:
    """The token texts in id order, as the file spells them."""
    tokens = description.get(_PREFIX + "tokens")
    if not tokens:
        raise UnsupportedModelError("the model has no vocabulary (tokenizer.ggml.tokens)")
    return tokens


def token_types(description: Mapping[str, Any]) -> Sequence[int]:
    """One type per token; a file without types has only normal tokens."""
    size = len(vocabulary(description))
    types = description.get(_PREFIX + "token_type")
    if types is None:
        return [NORMAL] * size
    if len(types) != size:
        raise ModelError(f"tokenizer.ggml.token_type: {len(types)} entries for {size} tokens")
    return types


def special_id(description: Mapping[str, Any], name: str) -> int | None:
    """The id stored as `tokenizer.ggml.<name>_token_id` (bos, eos, eot, unknown, ...), or None.

    Raises ModelError for an id outside the vocabulary; padding and unknown, on which little depends, may also be -1.
    """
    key = f"{_PREFIX}{name}_token_id"
    value = description.get(key)
    if value is None:
        return None
    size = len(vocabulary(description))
    if not 0 <= value < size:
        if name in ("padding", "unknown") and value in _NO_ID:
            return None
        raise ModelError(f"{key}: {value} is outside the vocabulary of {size} tokens")
    return int(value)


def control_ids(description: Mapping[str, Any]) -> list[int]:
    """Ids that plain text must never produce, ascending.

    These are the control and unknown types, and what the file itself names as its bos, eos, eot or eom
    token: files exist that type those as user-defined or normal. (A normal token counts only when it is
    spelled like a marker, so that a careless id cannot take a letter out of the vocabulary.)
    """
    tokens, types = vocabulary(description), token_types(description)
    found = {i for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)}
    for name in ("bos", "eos", "eot", "eom"):
        named = special_id(description, name)
        if named is not None and (types[named] != NORMAL or _is_marker(tokens[named])):
            found.add(named)
    return sorted(found)


def _is_marker(text: str) -> bool:
    return len(text) > 2 and (text[0] + text[-1]) in ("<>", "[]")


def end_of_generation_ids(description: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids after which generation stops, ascending: eos, eot, eom and control tokens spelled like an end marker."""
    tokens, types = vocabulary(description), token_types(description)
    found = {i for i, text in enumerate(tokens) if text in END_MARKERS and types[i] == CONTROL}
    for name in ("eos", "eot", "eom"):
        named = special_id(description, name)
        if named is not None:
            found.add(named)
    spellings = {tokens[i] for i in found}
    # Formats with several channels end one message with <|end|> and the whole answer with another marker.
    if spellings & {"<|call|>", "<|calls|>"} and spellings & {"<|return|>", "<|flush|>"}:
        found = {i for i in found if tokens[i] != "<|end|>"}
    return tuple(sorted(found))


@cache
def byte_alphabet() -> str:
    """The printable stand-ins of the 256 bytes in byte-level vocabularies (GPT-2), indexed by byte.

    Printable Latin-1 characters stand for themselves; the others are numbered upwards from U+0100.
    """
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return "".join(chr(b) if b in kept else chr(next(moved)) for b in range(256))


def byte_token_value(text: str) -> int:
    """The byte that a `<0xNN>` token stands for."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return int(text[3:5], 16)
        except ValueError:
            pass
    raise ModelError(f"tokenizer.ggml.tokens: byte token {text!r} is not of the form <0xNN>")
