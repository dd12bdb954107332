"""From what a program gives to a checked request: by the same table of fields as the rows of a batch file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coremill.config.errors import RequestError
from coremill.config.joboptions import OPTION_NAMES, JobOptions, check_job_options
from coremill.config.request import (
    CHAT_URL,
    COMPLETIONS_URL,
    GenerationRequest,
    SamplingParams,
    check_sampling,
    parse_body,
    parse_row,
)
from coremill.config.request_fields import check_bool, check_text, check_token_ids, invalid, shown

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
    body = {name: plain(name, value) for name, value in given.items()}
    ids = body.pop("prompt_ids", None)
    if ids is not None:
        body["prompt"] = check_token_ids(ids, "prompt_ids")
    return parse_body(CHAT_URL if named == ["messages"] else COMPLETIONS_URL, body, custom_id=custom_id)


Models = Callable[[], frozenset[str]] | None


@dataclass(frozen=True, slots=True)
class Defaults:
    """What all rows of a map() have in common. options: fields of submit() on how a job is queued; a timeout counts
    from the submission of each row. chat: texts are messages of a user, behind the message `system` if there is one.
    models: names that a row may give in `model`, None: any."""

    sampling: SamplingParams
    options: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = False
    system: str | None = None
    models: Models = None


def defaults_of(fields: Mapping[str, Any], chat: Any, system: Any, models: Models) -> Defaults:
    """From the keywords of map(): TypeError for one that it does not have, RequestError for a wrong value."""
    known = SamplingParams.__dataclass_fields__
    unknown = next((name for name in fields if name not in known and name not in OPTION_NAMES), None)
    if unknown is not None:
        raise TypeError(f"{unknown!r} is no field that all rows can have: {', '.join((*known, *OPTION_NAMES))}")
    check_job_options(fields)
    return Defaults(
        check_sampling({name: plain(name, fields[name]) for name in fields if name in known}),
        {name: fields[name] for name in fields if name in OPTION_NAMES},
        check_bool(chat, "chat") or system is not None,
        None if system is None else check_text(system, "system"),
        models,
    )


def request_of_row(row: Any, number: int, defaults: Defaults) -> tuple[GenerationRequest, JobOptions]:
    """A row of map(): a text, or a mapping as in a line of a batch file, which may have the fields of JobOptions too.
    number: of the row, from 1, which names it. A row that is a RequestError has failed already."""
    if isinstance(row, RequestError):
        raise row
    if isinstance(row, str):
        given: dict[str, Any] = {"prompt": row}
        if defaults.chat:
            system = [] if defaults.system is None else [{"role": "system", "content": defaults.system}]
            given = {"messages": [*system, {"role": "user", "content": row}]}
        return parse_row(given, number, defaults.sampling), check_job_options(defaults.options)
    if not isinstance(row, Mapping):
        raise invalid("row", row, "a text or a mapping of a request's fields")
    given = {name: plain(name, value) for name, value in row.items() if name not in OPTION_NAMES}
    request = parse_row(given, number, defaults.sampling)
    if request.model is not None and defaults.models is not None and request.model not in defaults.models():
        known = ", ".join(f"'{known}'" for known in sorted(defaults.models()))
        problem = f"'model' is {shown(request.model)}: it must be one of {known}"
        raise RequestError("model_not_found", problem, "model")
    own = {name: row[name] for name in OPTION_NAMES if row.get(name) is not None}
    return request, check_job_options({**defaults.options, **own})


def plain(name: str, value: Any) -> Any:
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
            return {key: plain(key, item) for key, item in value.items()}
        case "metadata" if isinstance(value, Mapping):
            return dict(value)
    return value


def _listed(value: Any, param: str, limit: str) -> list[Any]:
    """Anything that can be gone through once."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise invalid(param, value, limit)
    return list(value)
