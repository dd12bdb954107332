"""Bytes to text: nothing depends on where tokens end."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coremill.coordinator.text.detokenize import TextStream, text_of

BYTES = [bytes([b]) for b in range(256)]


def streamed(pieces):
    stream = TextStream([])
    return [stream.add_bytes(piece) for piece in pieces] + [stream.end()]


def cuts(data, rng):
    places = sorted(rng.choices(range(len(data) + 1), k=5))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@given(st.binary(max_size=40) | st.text().map(str.encode), st.randoms(use_true_random=False))
def test_any_bytes_in_any_pieces(data, rng):
    assert "".join(streamed(cuts(data, rng))) == data.decode(errors="replace") == text_of(data, BYTES)


@given(st.text(max_size=30))
def test_text_is_never_broken(text):
    pieces = streamed([bytes([b]) for b in text.encode()])
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


def test_unfinished_characters_are_held_back():
    assert streamed([b"\xf0", b"\x9f\x98", b"\x80!"]) == ["", "", "😀!", ""]
    assert streamed([b"a\xe2\x82"]) == ["a", "\ufffd"]
    assert streamed([b"a\xe2\x82", b"b"]) == ["a", "\ufffdb", ""]
    assert streamed([b"\xff", b"x"]) == ["\ufffd", "x", ""]


def test_with_a_real_vocabulary(smollm2):
    text = "naïve 😀 中文 \u200b🏳️‍🌈 end"
    ids = smollm2.encode(text)
    stream = TextStream(smollm2.token_bytes)
    assert "".join([stream.add(token) for token in ids] + [stream.end()]) == text == text_of(ids, smollm2.token_bytes)
    # Random ids make all kinds of broken bytes.
    rng = random.Random(5)
    ids = [rng.randrange(smollm2.vocab_size) for _ in range(3000)]
    assert "".join([stream.add(token) for token in ids] + [stream.end()]) == text_of(ids, smollm2.token_bytes)


def test_an_id_outside_the_vocabulary(smollm2):
    with pytest.raises(IndexError):
        text_of([smollm2.vocab_size], smollm2.token_bytes)
