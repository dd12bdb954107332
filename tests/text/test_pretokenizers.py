"""Pre-tokenizer recipes: every one builds, loses nothing, and cuts as its family does."""

import time

import pytest

from coremill.config.errors import UnsupportedModelError
from coremill.config.tokens import byte_alphabet
from coremill.coordinator.text.pretokenizers import RECIPES, build_pre_tokenizer, recipe_of

SAMPLE = "Hello  World's I'LL 1234567 camelCase ÀÉ é中文, ｆｕ!\n\n x  \r\n\tfoo.bar() '漢字' ½¾ 한국어 '"
TO_BYTE = {character: byte for byte, character in enumerate(byte_alphabet())}


def words(name, text):
    """The words of a text, as text where they are."""
    cut = build_pre_tokenizer(RECIPES[name].steps).pre_tokenize_str(text)
    return [bytes(TO_BYTE[c] for c in word).decode(errors="backslashreplace") for word, _ in cut]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_keeps_every_byte(name):
    for text in (SAMPLE, SAMPLE[::-1], " ", "\n", "", "<|im_end|>", "3333333333"):
        cut = build_pre_tokenizer(recipe_of(name).steps).pre_tokenize_str(text)
        assert bytes(TO_BYTE[c] for word, _ in cut for c in word).decode() == text


@pytest.mark.parametrize(
    "names, text, expected",
    [
        (["gpt-2", "olmo", "jais", "phi-2"], "a's 1234 x  y", ["a", "'s", " 1234", " x", " ", " y"]),
        (["smollm", "starcoder", "refact", "command-r", "exaone"], "a 123  b", ["a", " ", "1", "2", "3", " ", " b"]),
        (["llama-bpe", "dbrx", "smaug-bpe", "glm4"], "I'LL x12345\n\nb", ["I", "'LL", " x", "123", "45", "\n\n", "b"]),
        (["qwen2", "stablelm2", "hunyuan"], "a.b 123\n", ["a", ".b", " ", "1", "2", "3", "\n"]),
        (["qwen35"], "\u0e01\u0e49\u0e32", ["\u0e01\u0e49\u0e32"]),
        (["qwen2"], "\u0e01\u0e49\u0e32", ["\u0e01", "\u0e49\u0e32"]),
        (["gpt-4o", "llama4"], "camelCase isn't 12345", ["camel", "Case", " isn't", " ", "123", "45"]),
        (["tekken"], "camelCase isn't 123", ["camel", "Case", " isn", "'t", " ", "1", "2", "3"]),
        (["deepseek-llm"], "Abc 123 中文x\n\n", ["Abc", " ", "123", " ", "中文", "x", "\n", "\n"]),
        (["deepseek-coder"], "Abc 123 中文x\n", ["Abc", " ", "1", "2", "3", " ", "中文", "x", "\n"]),
        (["deepseek-v3"], "x = 12345 中文abc", ["x", " =", " ", "123", "45", " ", "中文", "abc"]),
        (["falcon"], "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        (["bloom", "poro-chat"], "a b, c(d)1", ["a", " b", ",", " c", "(", "d", ")", "1"]),
        (["viking"], "a 12", ["a", " ", "1", "2"]),
        (["chameleon"], "a\nb  c12", ["a", "\n", "b", "  ", "c", "1", "2"]),
        (["superbpe"], "it is 1234567.", ["it is ", "1", "234", "567", "."]),
        (["tiny_aya"], "n 1234567", ["n", " ", "1", "234", "567"]),
        (["jais-2"], "a" + " " * 7 + "b", ["a", "    ", "  ", " b"]),
        (["bailingmoe"], "it'S 12\n\n", ["it", "'S", " ", "1", "2", "\n\n"]),
        (["minicpm5"], "x1234", ["x", "123", "4"]),
        (["laguna"], "a.\n\nb", ["a", ".", "\n\n", "b"]),
        (["kimi-k2"], "x漢字y 1234", ["x", "漢字", "y", " ", "123", "4"]),
        (["default"], "a=b 12345", ["a", "=", "b", " ", "123", "45"]),
    ],
)
def test_words(names, text, expected):
    for name in names:
        assert words(name, text) == expected, name


def test_names_of_common_models_are_there():
    common = """smollm llama-bpe llama3 qwen2 gpt-2 default deepseek-llm deepseek-coder falcon starcoder refact
    command-r olmo dbrx stablelm2 tekken smaug-bpe jais viking poro-chat bloom exaone minerva-7b codeshell
    gpt-4o superbpe chameleon deepseek-v3 deepseek-r1-qwen qwen35 glm4 chatglm-bpe phi-2 mpt falcon3 llama4"""
    assert set(common.split()) <= set(RECIPES)


@pytest.mark.parametrize("name", ["smollm ", "SMOLLM", "gemma4", "", "../x"])
def test_unknown_names_are_refused(name):
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer"):
        recipe_of(name)


@pytest.mark.parametrize("name", ["smollm", "llama-bpe", "qwen2", "gpt-2", "gpt-4o", "tekken", "deepseek-v3", "falcon"])
@pytest.mark.parametrize("unit", ["a", " ", "1", "=", "aB", "\r\n"])
def test_long_runs_are_cut_in_linear_time(name, unit):
    cut = build_pre_tokenizer(RECIPES[name].steps).pre_tokenize_str
    start = time.perf_counter()
    cut(unit * 20_000)
    assert time.perf_counter() - start < 5


def test_composed_forms_where_the_tokenizer_composes(byte_level):
    from coremill.coordinator.text.tokenizer import ModelTokenizer

    decomposed, composed = "e\u0301", "\u00e9"
    for name, same in (("qwen2", True), ("command-r", True), ("llama-bpe", False), ("smollm", False)):
        tokenizer = ModelTokenizer.from_description(byte_level(pre=name, bos_token_id=0))
        assert (tokenizer.encode(decomposed) == tokenizer.encode(composed)) is same
