"""Token ids: the reference cases, what text may produce, and that text survives."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coremill.config.errors import ModelError, RequestError, UnsupportedModelError
from coremill.coordinator.text.tokenizer import ModelTokenizer

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent.parent / "data/reference/tokenizer_cases.jsonl").read_text().split("\n")
    if line
]


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_reference_cases(model, request):
    tokenizer = request.getfixturevalue(model)
    cases = [case for case in CASES if case["model"] == model]
    assert len(cases) > 50
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_a_batch_gives_what_single_texts_give(model, request):
    tokenizer = request.getfixturevalue(model)
    cases = [case for case in CASES if case["model"] == model]
    assert tokenizer.encode_pieces([[case["text"]] for case in cases]) == [case["ids"] for case in cases]


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(codec="utf-8", max_codepoint=0x3FFFF)))
def test_byte_level_text_survives(smollm2, text):
    try:
        ids = smollm2.encode(text)
    except RequestError as error:
        assert error.code == "unencodable_text"
        assert any(c in "\x04\x06\x13\x14\x16\x1d" for c in text)
        return
    assert smollm2.decode_bytes(ids).decode() == text
    assert not set(ids) & set(smollm2.controls.values())


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\u2581")))
def test_sentencepiece_text_survives(gemma3, text):
    ids = gemma3.encode(text)
    assert gemma3.decode_bytes(ids).decode() == text
    assert not set(ids) & set(gemma3.controls.values())


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_no_spelling_of_a_control_token_becomes_one(model, request):
    tokenizer = request.getfixturevalue(model)
    for text in list(tokenizer.controls)[:200]:
        for spelled in (text, f" {text} ", f"a{text}b", text * 3, text[:-1] + text):
            ids = tokenizer.encode(spelled)
            assert not set(ids) & set(tokenizer.controls.values())
            assert tokenizer.decode_bytes(ids).decode() == spelled


def test_control_tokens_where_they_are_allowed(smollm2):
    ids = smollm2.encode("<|im_start|>user\nhi<|im_end|><|im_end|", allow_special=True)
    assert ids[:3] == [1, 4093, 198] and ids.count(2) == 1
    assert smollm2.split_special("a<|im_end|>b<|im_start|>") == ["a", 2, "b", 1]


def test_the_longest_control_token_wins(byte_level):
    tokenizer = ModelTokenizer.from_description(byte_level(["<a>", "<a><b>", "<a"]))
    assert tokenizer.split_special("x<a><b><a>y<az<") == ["x", 1, 0, "y", 2, "z<"]


def test_user_defined_tokens_are_text_that_anybody_may_write(byte_level):
    description = byte_level(extra=[("<tool_call>", 4), ("  ", 4)])
    tokenizer = ModelTokenizer.from_description(description)
    first = len(description["tokenizer.ggml.tokens"]) - 2
    ids = tokenizer.encode("a<tool_call>  b")
    assert ids[1:3] == [first, first + 1]
    assert tokenizer.decode_bytes(ids) == b"a<tool_call>  b"


@pytest.mark.parametrize("kind", [4, 1])
def test_a_mistyped_end_token_is_still_out_of_reach(byte_level, kind):
    description = byte_level(extra=[("<|im_end|>", kind)])
    token_id = len(description["tokenizer.ggml.tokens"]) - 1
    description["tokenizer.ggml.eos_token_id"] = token_id
    tokenizer = ModelTokenizer.from_description(description)
    assert token_id not in tokenizer.encode("x<|im_end|>y")
    assert tokenizer.encode("<|im_end|>", allow_special=True) == [token_id]


def test_whole_words_do_not_open_a_way_to_control_tokens(byte_level):
    """llama3-like vocabularies take a word that is a token as it is; a control token can look like a word."""
    description = byte_level(["pad", "<|bos|>"], pre="llama-bpe", bos_token_id=1)
    tokenizer = ModelTokenizer.from_description(description)
    assert 0 not in tokenizer.encode("pad pad")


class TestBos:
    def test_added_once(self, gemma3):
        assert gemma3.add_bos and gemma3.special.bos == 2
        assert gemma3.encode_pieces([["Hi"], [2, "Hi"], []], add_bos=True) == [[2, 10979], [2, 10979], [2]]

    def test_not_added_unless_asked(self, gemma3):
        assert gemma3.encode("Hi") == [10979]

    def test_the_file_decides(self, byte_level):
        for given_flag, pre, expected in [(True, "gpt-2", True), (None, "gpt-2", False), (None, "llama-bpe", True)]:
            description = byte_level(pre=pre, bos_token_id=0, add_bos_token=given_flag)
            assert ModelTokenizer.from_description(description).add_bos is expected

    def test_missing(self, byte_level):
        with pytest.raises(ModelError, match="bos_token_id is missing"):
            ModelTokenizer.from_description(byte_level(add_bos_token=True))


def test_a_character_without_token_is_refused_by_name(smollm2):
    with pytest.raises(RequestError, match=r"character 3 of the text is U\+0004") as caught:
        smollm2.encode("añb\x04")
    assert caught.value.code == "unencodable_text"


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
@pytest.mark.parametrize("unit", ["a", " ", "\n", "=", "é", "ab", "😀"])
def test_long_runs_stay_about_linear(model, unit, request):
    tokenizer = request.getfixturevalue(model)
    text = unit * (130_000 // len(unit))
    start = time.perf_counter()
    ids = tokenizer.encode(text)
    # Milliseconds in practice; anything quadratic takes minutes.
    assert time.perf_counter() - start < 5
    assert tokenizer.decode_bytes(ids).decode() == text


class TestRefusals:
    @pytest.mark.parametrize(
        "field, value, words",
        [
            ("model", "rwkv", "tokenizer 'rwkv' is not supported"),
            ("model", None, "tokenizer.ggml.model is missing"),
            ("pre", "nobody", "pre-tokenizer 'nobody' is not supported"),
            ("pre", None, "tokenizer.ggml.pre is missing"),
            ("tokens", None, "no vocabulary"),
        ],
    )
    def test_unsupported(self, byte_level, field, value, words):
        with pytest.raises(UnsupportedModelError, match=words):
            ModelTokenizer.from_description(byte_level(**{field: value}))

    @pytest.mark.parametrize(
        "fields, words",
        [
            ({"merges": None}, "merges is missing"),
            ({"merges": ["a b c"]}, "entry 0 is not two tokens"),
            ({"merges": ["a b", "c d", "a b"]}, "'a b' is there twice"),
            ({"token_type": [1]}, "1 entries for"),
            ({"eos_token_id": 10_000}, "eos_token_id: 10000 is outside the vocabulary"),
            ({"extra": [("a", 1)]}, "'a' is both id"),
        ],
    )
    def test_malformed(self, byte_level, fields, words):
        description = byte_level(extra=fields.pop("extra", ()))
        for key, value in fields.items():
            description["tokenizer.ggml." + key] = value
            if value is None:
                del description["tokenizer.ggml." + key]
        with pytest.raises(ModelError, match=words):
            ModelTokenizer.from_description(description)
