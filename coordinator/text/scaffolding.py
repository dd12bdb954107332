"""From a chat to pieces: which control tokens of a rendered template are the template's own?

A template writes `<|im_start|>` and means the control token. A message that holds the same characters
means characters. After rendering both look alike, so the strings of the request are marked beforehand with
a character that occurs nowhere else:

    request   Hi <|im_end|>
    marked    ^Hi ^<^|im_end|>^                                 (^ stands for the mark)
    rendered  <|im_start|>user\\n^Hi ^<^|im_end|>^<|im_end|>
    pieces    [1, "user\\nHi <|im_end|>", 2]                 marks break what they touch, then they go

Marks go around every character that a control token can start with, and enclose each string inside its
outer white space (so that `trim` still trims). Whatever a template does to marked text (upper, tojson, slices,
removals), no control token comes to be that has a character of the request in it.

Marks cost a second rendering, and a template that looks into its strings (`'</think>' in content`) may see the
difference. So the unmarked rendering stands whenever marks are not needed or prove that it is harmless, and the
marked one when in doubt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from coremill.coordinator.text.templates import ChatTemplate, template_error
from coremill.coordinator.text.tokenizer import ModelTokenizer, Piece

# Templates build control tokens from these ("<|" + role + "|>"), which is scaffolding and not a message's text.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "model"})
# Values of `type` fields, which templates compare.
_TYPES = frozenset(
    {"text", "image", "image_url", "audio", "input_audio", "video", "file", "function"}
    | {"object", "array", "string", "number", "integer", "boolean", "null"}
)


class Scaffolding:
    """Renders chats for one tokenizer and knows which control tokens in them are the template's."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._guard = _Guard(tokenizer.controls)

    def pieces(
        self,
        template: ChatTemplate,
        request: Mapping[str, Any],
        constants: Mapping[str, Any],
        *,
        allow_special: bool = False,
    ) -> list[Piece]:
        """Render a chat and cut it at the template's own control tokens.

        request: the template variables that came with the request (messages, tools, ...); constants: those that
        did not (bos_token, add_generation_prompt, ...). allow_special: the request may spell control tokens.

        Raises RequestError "template_error".
        """
        split = self._tokenizer.split_special
        plain = template.render({**request, **constants})
        if allow_special or not self._guard.concerns(request):
            return split(plain)
        marker = _Marker(self._guard.starts, request, template.source)
        marked = split(template.render({**marker.mark(request), **constants}))
        pieces = [clean for piece in marked if (clean := marker.clean(piece)) != ""]
        if self._text_of(pieces) == plain:
            return pieces
        # The template looked at the marks. What it does without them is better, if that cannot be an attack.
        unmarked = split(plain)
        if not self._guard.spelled(request) and _controls(unmarked) == _controls(pieces):
            return unmarked
        return pieces

    def _text_of(self, pieces: list[Piece]) -> str:
        return "".join(piece if isinstance(piece, str) else self._tokenizer.text_of(piece) or "" for piece in pieces)


def _controls(pieces: list[Piece]) -> list[int]:
    return [piece for piece in pieces if isinstance(piece, int)]


class _Guard:
    """Says whether strings of a request could have a part in a control token.

    starts: matches what a control token can start with, in both cases, and "&", which filters may turn into it.
    """

    def __init__(self, controls: Iterable[str]) -> None:
        self._controls = tuple(controls)
        firsts = {case for text in self._controls for case in (text[0].lower(), text[0].upper())}
        self.starts = re.compile("[" + re.escape("".join(sorted(firsts))) + "&]" if firsts else "(?!)")
        lowered = [text.lower() for text in self._controls]
        self._tails = frozenset(text[cut:] for text in lowered for cut in range(1, len(text)))
        self._insides = "\0".join(text[1:-1] for text in lowered)
        self._max_len = max(map(len, lowered), default=0)

    def concerns(self, request: Any) -> bool:
        """Whether any string holds a start, begins with the end, or is the inside of a control token."""
        return any(self.starts.search(text) or (whole and self._continues(text)) for text, whole in _strings(request))

    def _continues(self, text: str) -> bool:
        core = text.strip()[: self._max_len].lower()
        if not core:
            return False
        if any(core[:length] in self._tails for length in range(1, len(core) + 1)):
            return True
        return len(core) < self._max_len and core in self._insides

    def spelled(self, request: Any) -> bool:
        """Whether any string spells a control token, give or take case and white space."""
        texts = [_fold(text) for text, _ in _strings(request)]
        return any(control in text for control in map(_fold, self._controls) for text in texts)


def _fold(text: str) -> str:
    return "".join(text.casefold().split())


def _strings(value: Any, key: str | None = None) -> Iterator[tuple[str, bool]]:
    """All strings of a request, keys included, and whether their ends matter as well as their insides."""
    if isinstance(value, str):
        yield value, not _is_compared(key, value)
    elif isinstance(value, Mapping):
        for name, member in value.items():
            yield str(name), False
            yield from _strings(member, str(name))
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _strings(member, key)


def _is_compared(key: str | None, value: str) -> bool:
    """Values that templates compare rather than print as somebody's words."""
    return (key == "role" and value in _ROLES) or (key == "type" and value in _TYPES)


class _Marker:
    """Puts marks into the strings of a request and takes them out of rendered text."""

    def __init__(self, starts: re.Pattern[str], request: Any, source: str) -> None:
        self._starts = starts
        self._mark = _unused_character([source, *(text for text, _ in _strings(request))])
        self._forms = re.compile("|".join(map(re.escape, _forms_of(self._mark))), re.IGNORECASE)

    def mark(self, value: Any, key: str | None = None) -> Any:
        """A copy of a request's value with all strings marked."""
        if isinstance(value, str):
            return self._mark_text(value, enclose=not _is_compared(key, value))
        if isinstance(value, Mapping):
            names = map(str, value)
            return {
                self._mark_text(name, enclose=False): self.mark(member, name)
                for name, member in zip(names, value.values(), strict=True)
            }
        if isinstance(value, (list, tuple)):
            return [self.mark(member, key) for member in value]
        return value

    def clean(self, piece: Piece) -> Piece:
        return self._forms.sub("", piece) if isinstance(piece, str) else piece

    def _mark_text(self, text: str, *, enclose: bool) -> str:
        mark = self._mark
        marked = self._starts.sub(lambda match: mark + match.group() + mark, text)
        core = marked.strip()
        if not enclose or not core:
            return marked
        begin = marked.index(core)
        return marked[:begin] + mark + core + mark + marked[begin + len(core) :]


def _forms_of(character: str) -> list[str]:
    """A character as filters may write it: itself, escaped for JSON, percent-encoded."""
    return [character, json.dumps(character)[1:-1], quote(character)]


def _unused_character(texts: list[str]) -> str:
    """A character without case or meaning of which no form occurs in the texts: Unicode's noncharacters come first."""
    candidates = [*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xF0400)]
    lowered = [text.lower() for text in texts]
    for code in candidates:
        forms = [form.lower() for form in _forms_of(chr(code))]
        if not any(form in text for form in forms for text in lowered):
            return chr(code)
    raise template_error("the messages use every private character there is")
