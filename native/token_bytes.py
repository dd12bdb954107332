"""The bytes each token stands for, as one table: worked out once when a model is packed, read by id after.

A token's bytes are its text's contribution to the output, so that text can be put together from tokens
without the tokenizer and cut only where UTF-8 allows. Tokens that are never shown have none.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from coremill.config.errors import PackError, UnsupportedModelError
from coremill.config.tokens import BYTE, NORMAL, UNUSED, USER_DEFINED, byte_alphabet, check_description, control_ids

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_HEADER = struct.Struct("<II")


class TokenBytes(Sequence):
    """`table[id]` is the bytes of token `id`. Reads from a view of the pack; nothing is unpacked at opening.

    Format: u32 count, u32 bytes, u32 ends[count], bytes. Token i takes ends[i-1] to ends[i].
    """

    def __init__(self, section: memoryview) -> None:
        if len(section) < _HEADER.size:
            raise PackError("token bytes: the section is shorter than its header")
        count, length = _HEADER.unpack_from(section)
        if len(section) != _HEADER.size + 4 * count + length:
            raise PackError(f"token bytes: {count} tokens and {length} bytes do not fill the section")
        body = section[_HEADER.size :]
        self._ends = body[: 4 * count].cast("I")
        self._bytes = body[4 * count :]

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, token: Any) -> bytes:
        if not 0 <= token < len(self._ends):
            raise IndexError(token)
        begin = self._ends[token - 1] if token else 0
        end = self._ends[token]
        if not begin <= end <= len(self._bytes):
            raise PackError(f"token bytes: token {token} takes bytes {begin} to {end} of {len(self._bytes)}")
        return bytes(self._bytes[begin:end])


def build_token_bytes(tokenizer: Mapping[str, Any]) -> bytes:
    """The section `TokenBytes` reads, from the tokenizer.* metadata of a GGUF file.

    Raises:
        UnsupportedModelError: tokenizer.ggml.model is unknown, or its lists do not fit each other.
        ModelError: a field is malformed.
    """
    check_description(tokenizer)
    pieces = tokenizer.get("tokenizer.ggml.tokens")
    if pieces is None:
        return _HEADER.pack(0, 0)
    kind = tokenizer.get("tokenizer.ggml.model")
    if kind not in _DECODERS:
        known = ", ".join(sorted(_DECODERS))
        raise UnsupportedModelError(f"tokenizer.ggml.model {kind!r} is not supported; supported: {known}")
    types = tokenizer.get("tokenizer.ggml.token_type") or [NORMAL] * len(pieces)
    if len(types) != len(pieces):
        raise UnsupportedModelError(
            f"tokenizer.ggml.token_type has {len(types)} entries, but tokenizer.ggml.tokens has {len(pieces)}"
        )
    decode, table, ends, hidden = _DECODERS[kind], bytearray(), array("I"), set(control_ids(tokenizer))
    for token, (piece, token_type) in enumerate(zip(pieces, types, strict=True)):
        if token not in hidden and token_type != UNUSED:
            table += decode(piece, token_type)
        if len(table) > 0xFFFFFFFF:
            raise UnsupportedModelError("tokenizer.ggml.tokens: the tokens are longer than 4 GiB together")
        ends.append(len(table))
    return _HEADER.pack(len(ends), len(table)) + ends.tobytes() + bytes(table)


_ALPHABET = {ord(character): byte for byte, character in enumerate(byte_alphabet())}
# Characters outside the alphabet must not pass for a byte, so those that translate() would keep are moved away.
_TRANSLATE = {code: 0x10FFFF for code in range(256)} | _ALPHABET


def _byte_level(piece: str, token_type: int) -> bytes:
    if token_type == USER_DEFINED:
        return piece.encode()
    try:
        return piece.translate(_TRANSLATE).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()  # text that was never byte-encoded, e.g. an added token


def _sentencepiece(piece: str, token_type: int) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    if match and token_type in (NORMAL, BYTE):
        return bytes([int(match[1], 16)])
    return piece.replace("▁", " ").encode()


_DECODERS = {"gpt2": _byte_level, "llama": _sentencepiece}
