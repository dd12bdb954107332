"""A make-believe model, shared by tests within one process and by worker processes of tests."""

from __future__ import annotations

import zlib
from array import array

VOCAB = 64
STOP_ID = 0
POISON = 63
TOKEN_BYTES = [b""] + [bytes([97 + i % 7]) * (1 + i % 3) for i in range(1, VOCAB)]


def next_token(tokens, seed: int) -> int:
    """What the model says after `tokens`: any change of any of them changes it."""
    return zlib.crc32(array("i", tokens).tobytes(), seed & 0xFFFFFFFF) % (VOCAB - 1)


def expected(request, stop_ids=(STOP_ID,)) -> tuple[list[int], str, str]:
    """Tokens, text and finish reason of an undisturbed run, worked out the simplest way."""
    tokens, text = list(request.prompt_ids), b""
    for _ in range(request.max_tokens):
        token = next_token(tokens, request.seed)
        tokens.append(token)
        for byte in TOKEN_BYTES[token]:
            text += bytes([byte])
            ended = [stop for stop in request.stop if text.endswith(stop)]
            if ended:
                shown = text[: len(text) - len(max(ended, key=len))]
                return tokens[len(request.prompt_ids) :], shown.decode(), "stop"
        if token in stop_ids:
            return tokens[len(request.prompt_ids) :], text.decode(), "stop"
    return tokens[len(request.prompt_ids) :], text.decode(), "length"


class FakeBatch(list):
    def add(self, tokens, position, blocks, sample=None):
        self.append((list(tokens), position, list(blocks), sample))
