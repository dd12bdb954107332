"""From what a program gives to a checked request: by the same table of fields as the rows of a batch file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from coremill.config.errors import RequestError
from coremill.config.joboptions import NAMES, JobOptions, check_job_options
from coremill.config.request import (
    CHAT_URL,
    COMPLETIONS_URL,
    GenerationRequest,
    SamplingParams,
    parse_body,
    parse_row,
)
from coremill.config.request_fields import check_token_ids, invalid

_SOURCES = ("prompt", "messages", "prompt_ids")


def request_of_fields(given: dict[str, Any], custom_id: str) -> GenerationRequest:
    """The fields of submit(), None for those that are absent."""
    named = [name for name in _SOURCES if given.get(name) is not None]
    if len(named) != 1:
        said = " and ".join(named) if named else "none of them"
        raise RequestError("invalid_value", f"give exactly one of prompt, messages and prompt_ids, not {said}")
    if named == ["prompt"] and not isinstance(given["prompt"], str):
        kind = type(given["prompt"]).__name__
        raise RequestError("invalid_value", f"prompt is {kind}: it must be a string", "prompt")
    body = {name: _plain(name, value) for name, value in given.items()}
    ids = body.pop("prompt_ids", None)
    if ids is not None:
        body["prompt"] = check_token_ids(ids, "prompt_ids")
    return parse_body(CHAT_URL if named == ["messages"] else COMPLETIONS_URL, body, custom_id=custom_id)


def request_of_row(
    row: Any,
    number: int,
    defaults: SamplingParams,
    options: JobOptions,
    *,
    chat: bool = False,
    system: str | None = None,
) -> tuple[GenerationRequest, JobOptions]:
    """A row of map(): a text, or a mapping as in a line of a batch file, which may have the fields of JobOptions too.
    number: of the row, from 1, which names it. chat: texts are messages of a user, behind `system` if there is one."""
    if isinstance(row, str):
        if not chat and system is None:
            return parse_row({"prompt": row}, number, defaults), options
        messages = [] if system is None else [{"role": "system", "content": system}]
        return parse_row({"messages": [*messages, {"role": "user", "content": row}]}, number, defaults), options
    if not isinstance(row, Mapping):
        raise invalid("row", row, "a text or a mapping of a request's fields")
    given = {name: _plain(name, value) for name, value in row.items() if name not in NAMES}
    return parse_row(given, number, defaults), check_job_options(row, options)


def _plain(name: str, value: Any) -> Any:
    """What programs have instead of JSON: a tuple, a generator, an array, any mapping."""
    if value is None:
        return None
    match name:
        case "messages":
            messages = _listed(value, name, "a list of messages")
            return [dict(message) if isinstance(message, Mapping) else message for message in messages]
        case "prompt_ids":
            return _listed(value, name, "a list of token ids")
        case "stop" if not isinstance(value, str):
            return _listed(value, name, "a string or a list of strings")
        case "prompt" if not isinstance(value, str):
            return _listed(value, name, "a string or a list of token ids")
        case "body" if isinstance(value, Mapping):
            return {key: _plain(key, item) for key, item in value.items()}
        case "metadata" if isinstance(value, Mapping):
            return dict(value)
    return value


def _listed(value: Any, param: str, limit: str) -> list[Any]:
    """Anything that can be gone through once."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise invalid(param, value, limit)
    return list(value)
