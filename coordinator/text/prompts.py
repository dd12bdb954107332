"""Requests into token ids: what the helper process does, and nothing of how it is run."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from coremill.config.errors import RequestError
from coremill.coordinator.text.requests import TextRequest
from coremill.coordinator.text.tokenizer import ModelTokenizer, Piece

if TYPE_CHECKING:
    from coremill.coordinator.text.scaffolding import Scaffolding

# Texts shorter than this are tokenised without asking whether they can fit.
_SURELY_SHORT = 1 << 14
# Composing characters (NFC) makes a text at most this many times shorter.
_NFC_SHRINKS = 4


class Preparer:
    """Turns requests into ids for one model.

    Args:
        description: raw `tokenizer.*` metadata, including the model's chat template.
        now: what `strftime_now` tells templates.
        max_tokens: a text that must have more tokens than this is refused without being tokenised.
        template: Jinja source for all chats instead of the model's own.
    """

    def __init__(
        self,
        description: Mapping[str, Any],
        now: datetime.datetime,
        max_tokens: int | None = None,
        template: str | None = None,
    ) -> None:
        self.tokenizer = ModelTokenizer.from_description(description)
        self._template = template or description.get("tokenizer.chat_template") or None
        self._now = now
        self._max_tokens = max_tokens

    def prepare(self, requests: Sequence[TextRequest]) -> list[list[int] | RequestError]:
        """Ids of each request, or what is wrong with it."""
        pieces: dict[int, list[Piece]] = {}
        results: list[list[int] | RequestError] = []
        for row, request in enumerate(requests):
            results.append([])
            try:
                if isinstance(request.prompt, (str, type(None))):
                    pieces[row] = self._pieces(request)
                else:
                    results[row] = self._checked_ids(request.prompt)
            except RequestError as error:
                results[row] = error
        for row, ids in zip(pieces, self._encode(list(pieces.values())), strict=True):
            if isinstance(ids, RequestError):
                ids.param = "messages" if requests[row].prompt is None else "prompt"
            results[row] = ids
        return results

    def render_all(self, requests: Sequence[TextRequest]) -> list[str | RequestError]:
        """The text of each chat, or what is wrong with it."""
        results: list[str | RequestError] = []
        for request in requests:
            try:
                results.append(self.render(request))
            except RequestError as error:
                results.append(error)
        return results

    def render(self, request: TextRequest) -> str:
        """The text of a chat, as `apply_template` shows it."""
        template, variables, constants = self._chat(request)
        return template.render({**variables, **constants})

    def _pieces(self, request: TextRequest) -> list[Piece]:
        if request.prompt is None:
            template, variables, constants = self._chat(request)
            return self._scaffolding.pieces(template, variables, constants, allow_special=request.allow_special)
        self._refuse_over_long(request.prompt, "prompt")
        return self.tokenizer.split_special(request.prompt) if request.allow_special else [request.prompt]

    def _chat(self, request: TextRequest) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """The template, its variables that came with the request, and those that did not."""
        from coremill.coordinator.text.templates import compiled

        source = request.template or self._template
        if source is None:
            raise RequestError(
                "missing_chat_template",
                "the model has no chat template: give one with --chat-template FILE, or send a prompt, not messages",
                "messages",
            )
        for position, message in enumerate(request.messages or ()):
            if not isinstance(message, Mapping):
                raise RequestError("invalid_value", f"'messages.{position}' must be an object", f"messages.{position}")
            self._refuse_over_long(message.get("content"), f"messages.{position}.content")
        variables = {"tools": None, "documents": None, **(request.variables or {}), "messages": request.messages or []}
        constants = {**self._special_texts, "add_generation_prompt": request.add_generation_prompt}
        return compiled(source, self._now), variables, constants

    def _encode(self, prompts: list[list[Piece]]) -> list[list[int] | RequestError]:
        encode, add_bos = self.tokenizer.encode_pieces, self.tokenizer.add_bos
        try:
            return list(encode(prompts, add_bos=add_bos))
        except RequestError:
            return [_result_of(encode, prompt, add_bos) for prompt in prompts]

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        size = self.tokenizer.vocab_size
        for position, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise RequestError(
                    "invalid_value", f"'prompt' token {position} is {token!r}: ids go from 0 to {size - 1}", "prompt"
                )
        return list(ids)

    def _refuse_over_long(self, text: Any, param: str) -> None:
        if self._max_tokens is None or not isinstance(text, str) or len(text) < _SURELY_SHORT:
            return
        num_bytes = len(text.encode())
        least = num_bytes // (self._longest_token * _NFC_SHRINKS)
        if least > self._max_tokens:
            raise RequestError(
                "context_length_exceeded",
                f"'{param}' has {num_bytes} bytes, which are at least {least} tokens: the limit is {self._max_tokens}",
                param,
            )

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.token_bytes), default=1) or 1

    @cached_property
    def _scaffolding(self) -> Scaffolding:
        from coremill.coordinator.text.scaffolding import Scaffolding

        return Scaffolding(self.tokenizer)

    @cached_property
    def _special_texts(self) -> dict[str, str]:
        special, text_of = self.tokenizer.special, self.tokenizer.text_of
        ids = {"bos": special.bos, "eos": special.eos, "unk": special.unknown, "pad": special.padding}
        return {f"{name}_token": text for name, token in ids.items() if (text := text_of(token)) is not None}


def _result_of(encode: Any, prompt: list[Piece], add_bos: bool) -> list[int] | RequestError:
    try:
        return encode([prompt], add_bos=add_bos)[0]
    except RequestError as error:
        return error
