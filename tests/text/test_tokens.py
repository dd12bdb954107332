"""Facts about vocabularies: control ids, end-of-generation ids."""

import pytest

from coremill.config.errors import ModelError
from coremill.config.tokens import (
    byte_alphabet,
    byte_token_value,
    check_description,
    control_ids,
    end_of_generation_ids,
    special_id,
)


def description(tokens, **fields):
    texts, types = zip(*tokens, strict=True)
    made = {"tokens": list(texts), "token_type": list(types), **fields}
    return {"tokenizer.ggml." + key: value for key, value in made.items()}


def test_real_models(smollm2_description, gemma3_description):
    assert end_of_generation_ids(smollm2_description) == (0, 2)
    # <eos> and <end_of_turn>; "</s>" is a closing tag of HTML in this vocabulary.
    assert end_of_generation_ids(gemma3_description) == (1, 106)
    assert control_ids(smollm2_description) == list(range(17))
    assert 212 not in control_ids(gemma3_description)


def test_named_ids_end_a_text_whatever_they_are_spelled_like():
    given = description([("a", 1), ("<stop>", 3), ("<x>", 3), ("<|im_end|>", 4)], eos_token_id=1, eot_token_id=2)
    assert end_of_generation_ids(given) == (1, 2)


def test_a_message_end_is_not_the_end_where_messages_follow_each_other():
    tokens = [("<|end|>", 3), ("<|return|>", 3), ("<|call|>", 3)]
    assert end_of_generation_ids(description(tokens, eos_token_id=1)) == (1, 2)
    assert end_of_generation_ids(description(tokens[:1])) == (0,)


def test_control_ids_include_mistyped_ones_but_no_letters():
    tokens = [("a", 1), ("<s>", 1), ("</s>", 4), ("<unk>", 2), ("[EOT]", 1)]
    assert control_ids(description(tokens, bos_token_id=1, eos_token_id=2, eot_token_id=4)) == [1, 2, 3, 4]
    assert control_ids(description(tokens, bos_token_id=0)) == [3]


def test_malformed():
    with pytest.raises(ModelError, match="bos_token_id: 7 is outside"):
        special_id(description([("a", 1)], bos_token_id=7), "bos")
    with pytest.raises(ModelError, match="unknown_token_id: 1 is outside"):
        special_id(description([("a", 1)], unknown_token_id=1), "unknown")
    assert special_id(description([("a", 1)], padding_token_id=2**32 - 1), "padding") is None
    with pytest.raises(ModelError, match="'<0xG1>' is not of the form"):
        byte_token_value("<0xG1>")


@pytest.mark.parametrize(
    "field, value",
    [
        ("ggml.tokens", [1]),
        ("ggml.tokens", "abc"),
        ("ggml.merges", [["a", "b"]]),
        ("ggml.scores", ["1"]),
        ("ggml.token_type", [1.0]),
        ("ggml.model", ["gpt2"]),
        ("ggml.pre", 5),
        ("ggml.bos_token_id", "1"),
        ("ggml.eos_token_id", True),
        ("ggml.add_bos_token", 1),
        ("ggml.add_eos_token", True),
        ("ggml.token_type", [1, 99]),
        ("ggml.token_type", [0]),
        ("ggml.padding_token_id", 10_000),
        ("ggml.unknown_token_id", 10_000),
        ("chat_template", ["x"]),
    ],
)
def test_wrong_values(byte_level, field, value):
    check_description(byte_level())
    with pytest.raises(ModelError, match=field):
        check_description(byte_level() | {"tokenizer." + field: value})


def test_the_byte_alphabet():
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    assert alphabet[ord("a")] == "a" and alphabet[ord(" ")] == "Ġ" and alphabet[ord("\n")] == "Ċ"
