"""SentencePiece vocabularies against a slow, literal implementation of their merging."""

import random
import re

import pytest

from coremill.config.errors import ModelError, UnsupportedModelError
from coremill.coordinator.text.tokenizer import ModelTokenizer

BYTES = [f"<0x{b:02X}>" for b in range(256)]


def description_of(pieces, *, prefix=True, scores=None, **fields):
    """Control tokens 0-2, the byte tokens, then pieces whose scores fall from the first on."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    given = scores if scores is not None else [-float(i) for i in range(len(pieces))]
    made = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [0.0] * 259 + given,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": prefix,
        **fields,
    }
    return {"tokenizer.ggml." + key: value for key, value in made.items()}


def merged_literally(text, description):
    """SentencePiece BPE as its papers and code describe it: best score first, leftmost among equals."""
    tokens, types = description["tokenizer.ggml.tokens"], description["tokenizer.ggml.token_type"]
    scores = description["tokenizer.ggml.scores"]
    ids = {tokens[i]: i for i in range(len(tokens)) if types[i] in (1, 6)}
    symbols = list(text.replace(" ", "\u2581"))
    while True:
        best = None
        for i in range(len(symbols) - 1):
            token = ids.get(symbols[i] + symbols[i + 1])
            if token is not None and types[token] == 1 and (best is None or scores[token] > best[0]):
                best = (scores[token], i)
        if best is None:
            break
        symbols[best[1] : best[1] + 2] = ["".join(symbols[best[1] : best[1] + 2])]
    found = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids[f"<0x{b:02X}>"] for b in symbol.encode()]
    return found


def with_user_defined(text, description):
    """The same, with user-defined tokens cut out of the text first, the longest at each place."""
    tokens, types = description["tokenizer.ggml.tokens"], description["tokenizer.ggml.token_type"]
    ids = {text: i for i, text in enumerate(tokens) if types[i] == 4}
    pattern = re.compile("|".join(map(re.escape, sorted(ids, key=len, reverse=True))))
    found, end = [], 0
    for match in pattern.finditer(text):
        found += merged_literally(text[end : match.start()], description)
        found.append(ids[match.group()])
        end = match.end()
    return found + merged_literally(text[end:], description)


def test_random_vocabularies():
    rng = random.Random(20)
    for _ in range(150):
        alphabet = "ab\u2581" if rng.random() < 0.5 else "abc\u2581é"
        pieces = list(alphabet)
        while len(pieces) < 20:
            piece = rng.choice(pieces) + rng.choice(pieces)
            if piece not in pieces and len(piece) < 9:
                pieces.append(piece)
        # Trained vocabularies list a piece after its parts, and so does this one.
        description = description_of(pieces, prefix=False)
        tokenizer = ModelTokenizer.from_description(description)
        for _ in range(40):
            text = "".join(rng.choice("ab aab cé😀\n") for _ in range(rng.randint(0, 14)))
            assert tokenizer.encode(text) == merged_literally(text, description), (pieces, text)


def test_gemma3_against_the_literal_implementation(gemma3, gemma3_description):
    rng = random.Random(3)
    tokens, types = gemma3_description["tokenizer.ggml.tokens"], gemma3_description["tokenizer.ggml.token_type"]
    normal = [text.replace("\u2581", " ") for text, kind in zip(tokens, types, strict=True) if kind == 1]
    texts = ["".join(rng.choices(normal, k=rng.randint(1, 5))) for _ in range(1500)]
    texts += [rng.choice(normal)[:4] * rng.randint(1, 9) + rng.choice(normal) for _ in range(1500)]
    expected = [with_user_defined(text, gemma3_description) for text in texts[:20]]
    assert [gemma3.encode(text) for text in texts[:20]] == expected
    for text in texts:
        assert gemma3.decode_bytes(gemma3.encode(text)).decode() == text.replace("\u2581", " ")


def test_the_space_prefix_is_the_files_choice():
    pieces = ["a", "\u2581", "\u2581a", "b"]
    with_prefix = ModelTokenizer.from_description(description_of(pieces))
    without = ModelTokenizer.from_description(description_of(pieces, prefix=False))
    first = 259
    assert with_prefix.encode("a b") == [first + 2, first + 1, first + 3]
    assert without.encode("a b") == [first, first + 1, first + 3]
    assert with_prefix.encode("") == without.encode("") == []
    # Every stretch of text after a control token starts a word of its own.
    assert with_prefix.encode("a<s>a", allow_special=True) == [first + 2, 1, first + 2]


def test_characters_outside_the_vocabulary_become_bytes():
    tokenizer = ModelTokenizer.from_description(description_of(["a"], prefix=False))
    assert tokenizer.encode("a€") == [259, *(3 + b for b in "€".encode())]
    assert tokenizer.decode_bytes(tokenizer.encode("a€")).decode() == "a€"


@pytest.mark.parametrize("spelling", ["  ", "\u2581\u2581"])
def test_user_defined_spaces_in_either_spelling(spelling):
    description = description_of(["a", "\u2581", spelling], prefix=False)
    description["tokenizer.ggml.token_type"][-1] = 4
    tokenizer = ModelTokenizer.from_description(description)
    assert tokenizer.encode("a  a a") == [259, 261, 259, 260, 259]


def test_spelled_byte_and_control_tokens_are_text():
    pieces = ["<", ">", "s", "0", "x", "A", "<s", "<0", "x0", "A>", "s>", "0x", "<0x"]
    tokenizer = ModelTokenizer.from_description(description_of(pieces, prefix=False))
    for text in ("<s>", "<0x0A>"):
        ids = tokenizer.encode(text)
        assert min(ids) >= 259 and tokenizer.decode_bytes(ids).decode() == text


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"scores": None}, ModelError, "scores: missing"),
        ({"scores": [0.0]}, ModelError, "1 entries for"),
        ({"remove_extra_whitespaces": True}, UnsupportedModelError, "remove_extra_whitespaces"),
        ({"precompiled_charsmap": [1, 2]}, UnsupportedModelError, "precompiled_charsmap"),
    ],
)
def test_refusals(change, error, words):
    description = description_of(["a", "b", "ab"])
    for key, value in change.items():
        description["tokenizer.ggml." + key] = value
    with pytest.raises(error, match=words):
        ModelTokenizer.from_description(description)


def test_scores_that_say_no_order_are_refused():
    pieces = ["a", "b", "ab", "ba", "aba", "bab"]
    with pytest.raises(UnsupportedModelError, match="merge order is unknown"):
        ModelTokenizer.from_description(description_of(pieces, scores=[-1000.0] * len(pieces)))


def test_missing_byte_tokens_are_refused():
    description = description_of(["a"])
    description["tokenizer.ggml.token_type"][3] = 1
    with pytest.raises(UnsupportedModelError, match="255 of the 256 byte tokens"):
        ModelTokenizer.from_description(description)
