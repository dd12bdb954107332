"""Chat templates: Jinja2 as model files mean it, which is as transformers runs it.

A template comes from a model file or a request and is not trusted. The sandbox keeps it from reaching
anything but its variables; how much time and memory it takes is limited by the process it runs in.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from coremill.config.errors import RequestError
from coremill.coordinator.text.printable import PrintableEnvironment, check_printable

# How Python ends what it says of an object that has no text of its own.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>)")


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it only has a scope of its own."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of Jinja's own filter: models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _TemplateSays(TemplateError):
    """The template's own words, checked before."""


def _raise_exception(message: str) -> None:
    check_printable(message)
    raise _TemplateSays(message)


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja source.
        now: the time `strftime_now` tells; fixed, so that a prompt does not depend on when it is rendered.

    Raises RequestError "template_error" when the source is not valid.
    """

    def __init__(self, source: str, now: datetime.datetime) -> None:
        self.source = source
        environment = PrintableEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
        )
        # A prompt is the same each time it is rendered.
        del environment.filters["random"], environment.globals["lipsum"]
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = now.strftime
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise template_error(f"{error.message} (line {error.lineno})") from error
        except (TemplateError, ValueError, RecursionError) as error:
            raise template_error(str(error)) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of a chat. RequestError "template_error" carries the template's own words; Python's and Jinja's have
        no addresses, so that an error too is the same in every run."""
        try:
            return self._template.render(variables)
        except MemoryError:
            raise template_error("it needs more memory than a request may take") from None
        except _TemplateSays as error:
            raise template_error(error.message or TemplateError.__name__) from error
        except TemplateError as error:
            raise template_error(_ADDRESS.sub("", error.message or type(error).__name__)) from error
        except Exception as error:  # whatever an expression of the template raised: str + None, a missing method, ...
            raise template_error(_ADDRESS.sub("", f"{type(error).__name__}: {error}")) from error


def template_error(words: str) -> RequestError:
    return RequestError("template_error", f"the chat template failed: {words}", "messages")


@lru_cache(maxsize=16)
def compiled(source: str, now: datetime.datetime) -> ChatTemplate:
    return ChatTemplate(source, now)
