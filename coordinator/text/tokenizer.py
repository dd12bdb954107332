"""Token ids of a text, exactly as the model's own tokenizer gives them.

    description (raw `tokenizer.*` metadata) --from_description--> ModelTokenizer

The Hugging Face tokenizers library does the work; it is built without any control token. Nothing a text
spells can therefore become one. Where control tokens are wanted (a template's scaffolding, a prompt
that may use them) the text is cut at their spellings here, and only the rest reaches the library:

    "<|im_start|>user\\nhi" --split_special--> [1, "user\\nhi"] --encode_pieces--> [1, 4093, 198, ...]
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from coremill.config import tokens as vocab_facts
from coremill.config.errors import ModelError, RequestError, UnsupportedModelError
from coremill.coordinator.text.pretokenizers import build_pre_tokenizer, recipe_of
from coremill.coordinator.text.sentencepiece import SPACE, merges_from_scores
from coremill.native.token_bytes import TokenBytes, build_token_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models

# A piece of a prompt: text, or the id of a control token.
Piece = str | int


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids that have a meaning of their own; None where the model has none."""

    bos: int | None
    eos: int | None
    eot: int | None
    unknown: int | None
    padding: int | None

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> SpecialTokens:
        return cls(
            **{name: vocab_facts.special_id(description, name) for name in ("bos", "eos", "eot", "unknown", "padding")}
        )


class ModelTokenizer:
    """Encodes texts for one model. Safe to use from several threads.

    Attributes:
        vocab_size: number of ids.
        special: ids of bos, eos, ...
        add_bos: whether a prompt starts with BOS.
        controls: ids of the control tokens by spelling.
    """

    def __init__(
        self,
        backend: Tokenizer,
        description: Mapping[str, Any],
        controls: Sequence[int],
        *,
        add_bos: bool,
        unencodable: bytes = b"",
    ) -> None:
        self._backend = backend
        self._description = description
        texts = vocab_facts.vocabulary(description)
        self.vocab_size = len(texts)
        self.special = SpecialTokens.from_description(description)
        self.add_bos = bool(description.get("tokenizer.ggml.add_bos_token", add_bos))
        if self.add_bos and self.special.bos is None:
            raise ModelError("tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is missing")
        self.controls = {texts[i]: i for i in controls if texts[i]}
        self._unencodable = re.compile(b"[" + re.escape(unencodable) + b"]") if unencodable else None

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> ModelTokenizer:
        """Build from raw `tokenizer.*` metadata.

        Raises UnsupportedModelError naming a tokenizer model or pre-tokenizer that is not known, ModelError for
        fields that are malformed.
        """
        vocab_facts.check_description(description)
        model = description.get("tokenizer.ggml.model")
        if model == "gpt2":
            return _byte_level(cls, description)
        if model == "llama":
            return _sentencepiece(cls, description)
        if model is None:
            raise UnsupportedModelError("tokenizer.ggml.model is missing: the file has no tokenizer")
        raise UnsupportedModelError(f"tokenizer.ggml.model: the tokenizer {model!r} is not supported (gpt2, llama are)")

    def encode(self, text: str, *, allow_special: bool = False, add_bos: bool = False) -> list[int]:
        """Ids of a text. allow_special: spellings of control tokens become those tokens instead of plain text."""
        return self.encode_pieces([self.split_special(text) if allow_special else [text]], add_bos=add_bos)[0]

    def encode_pieces(self, prompts: Sequence[Sequence[Piece]], *, add_bos: bool = False) -> list[list[int]]:
        """Ids of several prompts, each a list of texts and control ids. BOS is added unless a prompt starts with it.

        Raises RequestError when a text has a character without any token in this vocabulary.
        """
        texts = [piece for pieces in prompts for piece in pieces if isinstance(piece, str)]
        if self._unencodable is not None:
            for text in texts:
                self._refuse_unencodable(text)
        encoded = iter(self._backend.encode_batch_fast(texts, add_special_tokens=False) if texts else ())
        results = []
        for pieces in prompts:
            ids: list[int] = []
            for piece in pieces:
                if isinstance(piece, str):
                    ids += next(encoded).ids
                else:
                    ids.append(piece)
            if add_bos and self.special.bos is not None and ids[:1] != [self.special.bos]:
                ids.insert(0, self.special.bos)
            results.append(ids)
        return results

    def split_special(self, text: str) -> list[Piece]:
        """Cut a text at the spellings of control tokens, the longest at each place first."""
        pieces: list[Piece] = []
        end = 0
        for start, stop, token in self._find_special(text):
            if start > end:
                pieces.append(text[end:start])
            pieces.append(token)
            end = stop
        if end < len(text):
            pieces.append(text[end:])
        return pieces

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of the texts of ids; control tokens add nothing. Raises IndexError for an id outside the vocabulary."""
        table = self.token_bytes
        return b"".join([table[i] for i in ids])

    def text_of(self, token_id: int | None) -> str | None:
        """The spelling of a token, as the file has it."""
        return None if token_id is None else vocab_facts.vocabulary(self._description)[token_id]

    @cached_property
    def _control_starts(self) -> re.Pattern[str]:
        firsts = {text[0] for text in self.controls}
        return re.compile("[" + re.escape("".join(sorted(firsts))) + "]" if firsts else r"(?!)")

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """id -> bytes."""
        return TokenBytes(memoryview(build_token_bytes(self._description)))

    @cached_property
    def _control_lengths(self) -> dict[str, list[int]]:
        """Lengths of the control tokens that start with a given character, longest first."""
        lengths: dict[str, set[int]] = {}
        for text in self.controls:
            lengths.setdefault(text[0], set()).add(len(text))
        return {first: sorted(found, reverse=True) for first, found in lengths.items()}

    def _find_special(self, text: str) -> Iterator[tuple[int, int, int]]:
        end = 0
        for match in self._control_starts.finditer(text):
            start = match.start()
            if start < end:
                continue
            for length in self._control_lengths[text[start]]:
                token = self.controls.get(text[start : start + length])
                if token is not None:
                    end = start + length
                    yield start, end, token
                    break

    def _refuse_unencodable(self, text: str) -> None:
        data = text.encode()
        match = self._unencodable.search(data)
        if match is None:
            return
        position = len(data[: match.start()].decode(errors="ignore"))
        raise RequestError(
            "unencodable_text",
            f"character {position} of the text is U+{ord(text[position]):04X}: the model has no token for it",
        )


def _byte_level(cls: type[ModelTokenizer], description: Mapping[str, Any]) -> ModelTokenizer:
    from tokenizers import Tokenizer, normalizers

    recipe = recipe_of(description.get("tokenizer.ggml.pre"))
    controls = vocab_facts.control_ids(description)
    vocab, user_defined = _usable_vocabulary(description, controls)
    merges = description.get("tokenizer.ggml.merges")
    if merges is None:
        raise ModelError("tokenizer.ggml.merges is missing: a byte-level vocabulary needs its merges")
    backend = Tokenizer(_byte_pair_model(vocab, merges, whole_words=recipe.whole_words))
    if recipe.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = build_pre_tokenizer(recipe.steps)
    _add_user_defined(backend, user_defined)
    alphabet = vocab_facts.byte_alphabet()
    # Bytes that no valid UTF-8 text has do not count.
    missing = bytes(b for b in range(256) if alphabet[b] not in vocab and not (b in (0xC0, 0xC1) or b > 0xF4))
    return cls(backend, description, controls, add_bos=recipe.add_bos, unencodable=missing)


def _sentencepiece(cls: type[ModelTokenizer], description: Mapping[str, Any]) -> ModelTokenizer:
    from tokenizers import Tokenizer, models, normalizers

    for key in ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"):
        if description.get(key):
            raise UnsupportedModelError(f"{key} is set: normalising SentencePiece models are not supported")
    controls = vocab_facts.control_ids(description)
    vocab, user_defined = _usable_vocabulary(description, controls)
    types, texts = vocab_facts.token_types(description), vocab_facts.vocabulary(description)
    byte_tokens = {vocab_facts.byte_token_value(texts[i]) for i, kind in enumerate(types) if kind == vocab_facts.BYTE}
    if len(byte_tokens) != 256:
        raise UnsupportedModelError(
            f"the vocabulary has {len(byte_tokens)} of the 256 byte tokens: SentencePiece models without byte fallback "
            "are not supported"
        )
    merges = merges_from_scores(description, vocab)
    # User-defined tokens are found in the raw text, where a space is a space.
    for text in user_defined:
        vocab[text.replace(SPACE, " ")] = vocab.pop(text)
    backend = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", SPACE)
    if description.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
    else:
        backend.normalizer = spaces
    _add_user_defined(backend, [text.replace(SPACE, " ") for text in user_defined])
    return cls(backend, description, controls, add_bos=True)


def _usable_vocabulary(description: Mapping[str, Any], controls: Sequence[int]) -> tuple[dict[str, int], list[str]]:
    """Ids by text of everything a text may produce, and the user-defined texts among them."""
    texts, types = vocab_facts.vocabulary(description), vocab_facts.token_types(description)
    vocab = dict(zip(texts, range(len(texts)), strict=True))
    if len(vocab) != len(texts):
        for token_id, text in enumerate(texts):
            if text and vocab[text] != token_id:
                raise ModelError(f"tokenizer.ggml.tokens: {text!r} is both id {token_id} and id {vocab[text]}")
    for hidden in ["", *(texts[i] for i in controls)]:
        vocab.pop(hidden, None)
    user_defined = [text for text, kind in zip(texts, types, strict=True) if kind == vocab_facts.USER_DEFINED]
    return vocab, [text for text in user_defined if text in vocab]


def _byte_pair_model(vocab: dict[str, int], merges: Sequence[str], *, whole_words: bool) -> models.BPE:
    """The library's model. Merges that lead to or over a control token are left out."""
    from tokenizers import models

    # Of equal ones the library would take the last and others the first, which cuts texts differently.
    if len(set(merges)) != len(merges):
        twice = next(merge for merge, count in Counter(merges).items() if count > 1)
        raise ModelError(f"tokenizer.ggml.merges: {twice!r} is there twice, so its rank is unknown")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        return models.BPE(vocab, pairs, ignore_merges=whole_words)
    except Exception:  # the library raises nothing more special; find out which merge it dislikes
        for number, pair in enumerate(pairs):
            if len(pair) != 2:
                raise ModelError(
                    f"tokenizer.ggml.merges: entry {number} is not two tokens: {merges[number]!r}"
                ) from None
    usable = [(a, b) for a, b in pairs if a in vocab and b in vocab and a + b in vocab]
    return models.BPE(vocab, usable, ignore_merges=whole_words)


def _add_user_defined(backend: Tokenizer, texts: Sequence[str]) -> None:
    """User-defined tokens are matched in the raw text, before anything else is done to it."""
    from tokenizers import AddedToken

    if texts:
        backend.add_tokens([AddedToken(text, normalized=False) for text in texts])
