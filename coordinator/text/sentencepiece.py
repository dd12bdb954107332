"""SentencePiece vocabularies: from scores to merges.

SentencePiece's BPE starts from single characters and joins the neighbours whose joined text has the highest
score, leftmost first among equals, until no join is in the vocabulary. With distinct scores this is merging
by rank, which the tokenizers library does: every way to split a piece into two pieces becomes a merge, all
of them ordered by the piece's score.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coremill.config import tokens as vocab_facts
from coremill.config.errors import ModelError, UnsupportedModelError

SPACE = "\u2581"


def merges_from_scores(description: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Merge pairs, best first, for the pieces of `vocab` (text -> id).

    Only normal pieces are joined from others: user-defined ones are found in the raw text beforehand.
    """
    texts, types = vocab_facts.vocabulary(description), vocab_facts.token_types(description)
    scores = description.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(texts):
        found = "missing" if scores is None else f"{len(scores)} entries for {len(texts)} tokens"
        raise ModelError(f"tokenizer.ggml.scores: {found}")
    joinable = (vocab_facts.NORMAL, vocab_facts.UNUSED)
    pieces = [i for i, text in enumerate(texts) if len(text) > 1 and types[i] in joinable and text in vocab]
    _require_order(pieces, scores)
    pieces.sort(key=lambda i: -scores[i])
    parts = {text for text, i in vocab.items() if types[i] in joinable}
    merges: list[tuple[str, str]] = []
    for i in pieces:
        text = texts[i]
        for cut in range(1, len(text)):
            left = text[:cut]
            if left in parts and text[cut:] in parts:
                merges.append((left, text[cut:]))
    return merges


def _require_order(pieces: list[int], scores: Any) -> None:
    """Scores that do not say which of two pieces goes first (converted placeholders) would make every id a guess."""
    distinct = len({scores[i] for i in pieces})
    if len(pieces) - distinct > len(pieces) // 100:
        raise UnsupportedModelError(
            f"tokenizer.ggml.scores: {len(pieces)} pieces share {distinct} scores, so their merge order is unknown"
        )
