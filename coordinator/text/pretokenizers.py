"""How text is cut into words before byte-level BPE: one recipe per `tokenizer.ggml.pre` name.

A `pre` name says which published tokenizer a GGUF file was converted from. Each recipe is that
tokenizer's own chain (normaliser, splits, the byte-level step), as its tokenizer.json writes it; the
names that share a chain are those llama.cpp's vocabulary loader treats alike. The patterns are data of
those tokenizers and go to the same regular expression engine that reads them there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coremill.config.errors import UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer


@dataclass(frozen=True, slots=True)
class Split:
    """Cut out every match of a pattern as a word of its own; `behavior` is the tokenizers library's name."""

    pattern: str
    behavior: str = "isolated"


@dataclass(frozen=True, slots=True)
class Digits:
    """Cut out digits, each alone or in runs."""

    individual: bool


@dataclass(frozen=True, slots=True)
class Punctuation:
    """Cut out runs of punctuation."""


@dataclass(frozen=True, slots=True)
class ByteLevel:
    """Write each byte of a word as its printable stand-in; with `gpt2_words`, cut by GPT-2's pattern first."""

    gpt2_words: bool = False


Step = Split | Digits | Punctuation | ByteLevel


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one family of byte-level tokenizers prepares text.

    steps: run in order. nfc: composed form first. whole_words: a word that is itself in the vocabulary
    is taken whole, whatever the merges say. add_bos: whether texts start with BOS when the file does
    not say.
    """

    steps: tuple[Step, ...]
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


def _gpt4_words(digits: str, *, letters: str = r"\p{L}+", symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    """The word pattern of GPT-4's family: contractions, letters, digits, symbols, line ends, spaces."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?" + letters + "|" + digits + "|" + symbols
        + r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )  # fmt: skip


_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SPACE_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased_words(digits: str, contraction: str, upper: str = _UPPER, lower: str = _LOWER, line_ends: str = r"[\r\n/]*"):
    """The word pattern of GPT-4o's family, which also cuts where lower case turns into upper case."""
    edge = r"[^\r\n\p{L}\p{N}]?"
    return (
        edge + upper + "*" + lower + "+" + contraction + "|" + edge + upper + "+" + lower + "*" + contraction
        + "|" + digits + r"| ?[^\s\p{L}\p{N}]+" + line_ends + _SPACE_TAIL
    )  # fmt: skip


_GPT2 = (ByteLevel(gpt2_words=True),)
_DIGITS_GPT2 = (Digits(individual=True), ByteLevel(gpt2_words=True))
_LLAMA3 = (Split(_gpt4_words(r"\p{N}{1,3}")), ByteLevel())
_QWEN2 = (Split(_gpt4_words(r"\p{N}")), ByteLevel())
_QWEN35 = (
    Split(_gpt4_words(r"\p{N}", letters=r"[\p{L}\p{M}]+", symbols=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")),
    ByteLevel(),
)
_GPT4O = (Split(_cased_words(r"\p{N}{1,3}", _CONTRACTION)), ByteLevel())
_TEKKEN = (Split(_cased_words(r"\p{N}", "")), ByteLevel())

# BLOOM's tokenizer cuts words at spaces and at the sentence marks of its languages only.
_BLOOM_SPLIT = Split(r" ?[^(\s|.,!?…。，、।۔،)]+")

_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# What the DeepSeek LLM tokenizer counts as a cased letter.
_DEEPSEEK_LETTERS = (
    "[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ"
    "Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_LLM = (
    Split("[\r\n]"),
    Split(r"\s?" + _DEEPSEEK_LETTERS),
    Split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
    Split(r"\s+$"),
    Split(_DEEPSEEK_CJK),
    Split(r"\p{N}+"),
    ByteLevel(),
)
_DEEPSEEK_CODER = (
    Split("[\r\n]"),
    Split(r"\s?\p{L}+"),
    Split(r"\s?\p{P}+"),
    Split(_DEEPSEEK_CJK),
    Split(r"\p{N}"),
    ByteLevel(),
)
_DEEPSEEK_V3 = (
    Split(r"\p{N}{1,3}"),
    Split(_CJK),
    Split(
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        + _SPACE_TAIL
    ),
    ByteLevel(),
)
_FALCON = (Punctuation(), ByteLevel(gpt2_words=True), Digits(individual=False), Split("[0-9][0-9][0-9]"))
_CHAMELEON = (
    Split("<sentinel:[0-9]+>"),
    Split("(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
    Split("([\t\n]|    |  )"),
    Digits(individual=True),
    Split(r"[\p{P}!-/:-@\[-`{-~]"),
    ByteLevel(gpt2_words=True),
)
_SUPERBPE = (Split(r"\p{N}+"), Split(r"(?=(\d{3})+(?!\d))"), ByteLevel())
_JAIS2_SPACES = "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s{1}"
_JAIS2 = (
    Split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        + _JAIS2_SPACES
    ),
    ByteLevel(),
)
_BAILING = (
    Split(r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"),
    ByteLevel(),
)
_SEED_CODER = (Split(_gpt4_words(r"\p{N}{1}", symbols=r" ?[^\s\p{L}\p{N}\r\n]+")), ByteLevel())
_EXAONE_MOE = (
    Split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    ByteLevel(),
)
_MINICPM5 = (Split(r"\p{N}{1,3}"), Split(_gpt4_words(r"\p{N}+")), ByteLevel())
_TINY_AYA = (
    Split(r"\d{1,3}(?=(?:\d{3})*\b)"),
    Split(_cased_words(r"\p{N}{1,3}", _CONTRACTION)),
    ByteLevel(),
)
_LAGUNA = (Split(r"(?:\r?\n)+(?!\r?\n)", "merged_with_next"), *_QWEN2)
_KIMI_K2 = (
    Split(
        r"[\p{Han}]+|"
        + _cased_words(
            r"\p{N}{1,3}",
            _CONTRACTION,
            r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
            r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
            r"[\r\n]*",
        )
    ),
    ByteLevel(),
)
# Not a published tokenizer: what llama.cpp does for files whose converter knew none.
_DEFAULT = (
    Split(r"[\p{P}\$\+<=>\^~\|]+"),
    Split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
    Split(r"\p{N}+"),
    Split("[0-9][0-9][0-9]"),
    ByteLevel(),
)

_FAMILIES: tuple[tuple[Recipe, tuple[str, ...]], ...] = (
    (Recipe(_DIGITS_GPT2), ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2")),
    (Recipe(_DIGITS_GPT2, nfc=True), ("command-r",)),
    (
        Recipe(_GPT2),
        ("gpt-2", "phi-2", "jais", "gigachat", "a.x-4.0", "mellum", "exaone4", "trillion", "granite-docling"),
    ),
    (Recipe(_GPT2, nfc=True), ("olmo", "mpt")),
    (
        Recipe(_LLAMA3, whole_words=True, add_bos=True),
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    ),
    (Recipe(_LLAMA3), ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")),
    (Recipe(_JAIS2), ("jais-2",)),
    (Recipe(_QWEN2, nfc=True), ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez")),
    (Recipe(_QWEN2), ("stablelm2", "hunyuan", "solar-open", "grok-2")),
    (Recipe(_QWEN35, nfc=True), ("qwen35",)),
    (Recipe(_GPT4O), ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")),
    (Recipe(_TEKKEN, whole_words=True, add_bos=True), ("tekken",)),
    (Recipe(_DEEPSEEK_LLM), ("deepseek-llm",)),
    (Recipe(_DEEPSEEK_CODER), ("deepseek-coder",)),
    (Recipe(_DEEPSEEK_V3), ("deepseek-v3", "hunyuan-dense", "joyai-llm")),
    (Recipe(_FALCON), ("falcon",)),
    (Recipe((_BLOOM_SPLIT, ByteLevel())), ("bloom", "poro-chat", "gpt3-finnish")),
    (Recipe((_BLOOM_SPLIT, Digits(individual=True), ByteLevel())), ("viking",)),
    (Recipe(_CHAMELEON, add_bos=True), ("chameleon",)),
    (Recipe(_SUPERBPE), ("superbpe",)),
    (Recipe(_BAILING), ("bailingmoe", "bailingmoe2", "llada-moe")),
    (Recipe(_SEED_CODER), ("seed-coder",)),
    (Recipe(_EXAONE_MOE), ("exaone-moe",)),
    (Recipe(_MINICPM5, whole_words=True), ("minicpm5",)),
    (Recipe(_TINY_AYA), ("tiny_aya", "cohere2moe")),
    (Recipe(_LAGUNA), ("laguna",)),
    (Recipe(_KIMI_K2), ("kimi-k2",)),
    (Recipe(_DEFAULT), ("default",)),
)

RECIPES: dict[str, Recipe] = {name: recipe for recipe, names in _FAMILIES for name in names}


def recipe_of(pre: str | None) -> Recipe:
    """The recipe of a `tokenizer.ggml.pre` name; UnsupportedModelError naming it when it is unknown or missing."""
    if pre is None:
        raise UnsupportedModelError(
            "tokenizer.ggml.pre is missing: the file does not say how its tokenizer cuts words; convert the model again"
        )
    recipe = RECIPES.get(pre)
    if recipe is None:
        raise UnsupportedModelError(f"tokenizer.ggml.pre: the pre-tokenizer {pre!r} is not supported")
    return recipe


def build_pre_tokenizer(steps: tuple[Step, ...]) -> PreTokenizer:
    """The tokenizers library's object for a chain of steps."""
    from tokenizers import pre_tokenizers

    built = [_build_step(step) for step in steps]
    return built[0] if len(built) == 1 else pre_tokenizers.Sequence(built)


def _build_step(step: Step) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    match step:
        case Split(pattern, behavior):
            return pre_tokenizers.Split(Regex(pattern), behavior)
        case Digits(individual):
            return pre_tokenizers.Digits(individual_digits=individual)
        case Punctuation():
            return pre_tokenizers.Punctuation("contiguous")
        case ByteLevel(gpt2_words):
            return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2_words)
