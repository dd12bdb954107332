"""What a request is: for batch rows, the Python interface and the HTTP server alike.

    bytes of a line --parse_line--> GenerationRequest --(tokenised)--> SequenceRequest --> SequenceResult

A GenerationRequest is what a person asks (texts, OpenAI's field names, run defaults filled in); a SequenceRequest
is what the engine runs (token ids and numbers only). Nothing is ignored: a field is used, or means what would
happen anyway (`n: 1`), or is refused by its name.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from coremill.config.errors import RequestError
from coremill.config.request_fields import (
    MAX_TOKENS_LIMIT,
    check_bool,
    check_custom_id,
    check_int,
    check_keys,
    check_metadata,
    check_number,
    check_stop,
    check_text,
    check_token_ids,
    invalid,
    shown,
)

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions; chat has none

Kind = Literal["chat", "completion"]
KIND_OF_URL: dict[str, Kind] = {CHAT_URL: "chat", COMPLETIONS_URL: "completion"}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. max_tokens None: 16 for completions, the room left for chat.
    seed None: derived from the run's seed and the row's custom_id. top_k 0 and min_p 0 are off."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One checked request. Exactly one of messages (chat) and prompt (completion) is set.

    messages: tuple of {"role": "system"|"user"|"assistant", "content": str}; prompt: text or token ids.
    allow_special: texts of the request may spell the model's control tokens.
    """

    custom_id: str
    kind: Kind
    messages: tuple[dict[str, str], ...] | None
    prompt: str | tuple[int, ...] | None
    sampling: SamplingParams
    model: str | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    allow_special: bool = False


@dataclass(slots=True)
class SequenceRequest:
    """What the engine runs. seed is a uint64; stop strings are bytes because tokens may split characters.
    The ids that end generation belong to the model, so the engine adds them."""

    key: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[bytes, ...] = ()
    priority: int = 0


@dataclass(slots=True)
class SequenceResult:
    """What came of a sequence: finish_reason is None exactly when error is set. Times are seconds."""

    key: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: Literal["stop", "length"] | None = None
    error: RequestError | None = None
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    worker: int = -1
    cached_tokens: int = 0


def parse_line(text: str | bytes, line_number: int, defaults: SamplingParams = SamplingParams()) -> GenerationRequest:
    """One line of a JSONL file. RequestError codes: invalid_utf8, invalid_json, and those of parse_row."""
    return parse_row(decode_json(text), line_number, defaults)


# Each value is an object of Python's, so that a long line of short ones would take a hundred times its size.
MAX_JSON_PARTS = 1 << 21
_JSON_PART = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[,\[{]')


def decode_json(text: str | bytes) -> Any:
    """Strict JSON: no NaN or Infinity, no key twice in one object (which value counts would be a guess)."""
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise RequestError("invalid_utf8", f"not valid UTF-8 at byte {error.start} of the line") from None
    if len(text) > MAX_JSON_PARTS and next(islice(_JSON_PART.finditer(text), MAX_JSON_PARTS, None), None):
        raise RequestError(
            "line_too_long", f"the line has more than {MAX_JSON_PARTS} JSON values: no prompt is so long"
        )
    try:
        return json.loads(text, object_pairs_hook=_object_without_twins, parse_constant=_refuse_constant)
    except RecursionError:
        raise RequestError("invalid_json", "not valid JSON: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise RequestError(
            "invalid_json", f"not valid JSON: {error.msg} at character {error.pos + 1} of the line"
        ) from None
    except ValueError:
        limit = sys.get_int_max_str_digits()
        raise RequestError(
            "invalid_json", f"the line has a number of more than {limit} digits: it is too large"
        ) from None


def _object_without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twin = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise RequestError("invalid_json", f"the key {shown(twin)} appears twice in one object")
    return made


def _refuse_constant(name: str) -> Any:
    raise RequestError("invalid_json", f"{name} is not JSON")


def custom_id_of(row: Any, line_number: int) -> str:
    """The row's custom_id, `line-N` without one. RequestError when it is not a usable string."""
    given = row.get("custom_id") if isinstance(row, dict) else None
    return f"line-{line_number}" if given is None else check_custom_id(given)


def parse_row(row: Any, line_number: int, defaults: SamplingParams = SamplingParams()) -> GenerationRequest:
    """A decoded line: an OpenAI batch line (it has url, method or body) or a bare object.

    RequestError codes: invalid_value, missing_required_parameter, unknown_url, invalid_method, and those of
    parse_body.
    """
    if not isinstance(row, dict):
        raise RequestError("invalid_value", f"the line is {shown(row)}: it must be a JSON object")
    check_keys(row, "row")
    custom_id = custom_id_of(row, line_number)
    if not row.keys() & {"url", "method", "body"}:
        if row.get("messages") is not None and row.get("prompt") is not None:
            raise RequestError("invalid_value", "the row has both 'messages' and 'prompt': give one", "prompt")
        url = COMPLETIONS_URL if row.get("prompt") is not None else CHAT_URL
        if row.get("messages") is None and row.get("prompt") is None:
            raise RequestError("missing_required_parameter", "the row has neither 'messages' nor 'prompt'")
        body = {key: value for key, value in row.items() if key != "custom_id"}
        return parse_body(url, body, custom_id=custom_id, defaults=defaults)
    for key in row:
        if key not in ("custom_id", "method", "url", "body"):
            raise RequestError(
                "unknown_parameter", f"{shown(key)} is not a field of a batch line (custom_id, method, url, body)", key
            )
    for key in ("url", "method", "body"):
        if row.get(key) is None:
            raise RequestError("missing_required_parameter", f"the batch line has no '{key}'", key)
    if not _is(row["method"], "POST"):
        raise RequestError("invalid_method", f"'method' is {shown(row['method'])}: it must be 'POST'", "method")
    return parse_body(row["url"], row["body"], custom_id=custom_id, defaults=defaults)


def parse_body(
    url: Any, body: Any, *, custom_id: str = "", defaults: SamplingParams = SamplingParams()
) -> GenerationRequest:
    """The body of an OpenAI request. null means absent, as OpenAI has it.

    RequestError codes: unknown_url, invalid_value, missing_required_parameter, unsupported_parameter (a field
    of OpenAI's that coremill does not have), unknown_parameter (nobody's field).
    """
    kind = KIND_OF_URL.get(url) if isinstance(url, str) else None
    if kind is None:
        known = " or ".join(f"'{known}'" for known in KIND_OF_URL)
        raise RequestError("unknown_url", f"'url' is {shown(url)}: it must be {known}", "url")
    if not isinstance(body, dict):
        raise invalid("body", body, "an object")
    check_keys(body, "body")
    given = {key: value for key, value in body.items() if value is not None}
    _refuse_other_fields(given, kind)
    source = "messages" if kind == "chat" else "prompt"
    if source not in given:
        raise RequestError("missing_required_parameter", f"'{source}' is missing", source)
    return GenerationRequest(
        custom_id=custom_id,
        kind=kind,
        messages=_check_messages(given["messages"]) if kind == "chat" else None,
        prompt=_check_prompt(given["prompt"]) if kind == "completion" else None,
        sampling=check_sampling(given, defaults),
        model=check_text(given["model"], "model") if "model" in given else None,
        user=check_text(given["user"], "user") if "user" in given else None,
        metadata=check_metadata(given["metadata"]) if "metadata" in given else None,
        allow_special=check_bool(given.get("allow_special", False), "allow_special"),
    )


# top_k, min_p and allow_special are ours; OpenAI's client sends them as `extra_body`.
_SHARED_FIELDS = frozenset(
    {
        "model",
        "user",
        "metadata",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "allow_special",
    }
)
_FIELDS: dict[Kind, frozenset[str]] = {
    "chat": _SHARED_FIELDS | {"messages", "max_completion_tokens"},
    "completion": _SHARED_FIELDS | {"prompt"},
}
# OpenAI's other fields, with the values that mean what coremill does anyway; () when only null does.
_SHARED_DEFAULTS: dict[str, tuple] = {
    "n": (1,), "stream": (False,), "stream_options": (), "frequency_penalty": (0,), "presence_penalty": (0,),
    "logit_bias": ({},),
}  # fmt: skip
_DEFAULTS: dict[Kind, dict[str, tuple]] = {
    "chat": {
        **_SHARED_DEFAULTS, "logprobs": (False,), "top_logprobs": (0,), "response_format": ({"type": "text"},),
        "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False), "functions": ([],),
        "function_call": ("none", "auto"), "modalities": (["text"],), "store": (False,), "audio": (),
        "service_tier": ("auto", "default"), "prediction": (), "reasoning_effort": (), "verbosity": (),
        "web_search_options": (), "safety_identifier": (), "prompt_cache_key": (), "prompt_cache_retention": (),
    },
    "completion": {**_SHARED_DEFAULTS, "best_of": (1,), "echo": (False,), "suffix": (), "logprobs": ()},
}  # fmt: skip


def _refuse_other_fields(given: Mapping[str, Any], kind: Kind) -> None:
    for name, value in given.items():
        if name in _FIELDS[kind]:
            continue
        no_ops = _DEFAULTS[kind].get(name)
        if no_ops is None:
            import difflib  # costs more to import than most runs need

            close = difflib.get_close_matches(name[:100], sorted(_FIELDS[kind]), n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise RequestError("unknown_parameter", f"{shown(name)} is not a field of a {kind} request{hint}", name)
        if not any(_is(value, no_op) for no_op in no_ops):
            takes = f"takes it only as {' or '.join(json.dumps(no_op) for no_op in no_ops)}" if no_ops else "has it not"
            problem = f"'{name}' is {shown(value)}: coremill {takes}; leave it out"
            raise RequestError("unsupported_parameter", problem, name)


def _is(value: Any, known: Any) -> bool:
    """Equality as JSON has it, where true is not 1; also for values that programs have and that do not compare."""
    try:
        return bool(value == known) and isinstance(value, bool) == isinstance(known, bool)
    except Exception:  # an array compares element by element
        return False


def check_sampling(given: Mapping[str, Any], defaults: SamplingParams = SamplingParams()) -> SamplingParams:
    """The sampling fields of `given` (OpenAI names, values as JSON has them, None absent) over `defaults`."""
    found: dict[str, Any] = {}
    for name, check in _SAMPLING_CHECKS.items():
        if given.get(name) is not None:
            found[name] = check(given[name], name)
    newer = found.pop("max_completion_tokens", None)
    if newer is not None:
        if found.get("max_tokens", newer) != newer:
            raise RequestError(
                "invalid_value",
                f"'max_tokens' is {found['max_tokens']} and 'max_completion_tokens' is {newer}: give one",
                "max_completion_tokens",
            )
        found["max_tokens"] = newer
    return replace(defaults, **found) if found else defaults


_SAMPLING_CHECKS = {
    "max_tokens": lambda value, name: check_int(value, name, 1, MAX_TOKENS_LIMIT),
    "max_completion_tokens": lambda value, name: check_int(value, name, 1, MAX_TOKENS_LIMIT),
    "temperature": lambda value, name: check_number(value, name, 0, 2),
    "top_p": lambda value, name: check_number(value, name, 0, 1),
    "top_k": lambda value, name: check_int(value, name, 0, MAX_TOKENS_LIMIT),
    "min_p": lambda value, name: check_number(value, name, 0, 1),
    "seed": lambda value, name: check_int(value, name, -(2**63), 2**63 - 1),
    "stop": check_stop,
}

# OpenAI's newer models take `developer` where older ones took `system`; chat templates know only the latter.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_UNSUPPORTED_ROLES = {"tool", "function"}


def _check_messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise invalid("messages", value, "a non-empty list of messages")
    return tuple(_check_message(message, f"messages.{index}") for index, message in enumerate(value))


def _check_message(message: Any, param: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise invalid(param, message, "an object with 'role' and 'content'")
    check_keys(message, param)
    for name, value in message.items():
        if name not in ("role", "content") and value is not None and not _is(value, []):
            raise RequestError(
                "unsupported_parameter",
                f"'{param}.{name[:60]}': only role and content are supported",
                f"{param}.{name}",
            )
    for name in ("role", "content"):
        if message.get(name) is None:
            raise RequestError("missing_required_parameter", f"'{param}.{name}' is missing", f"{param}.{name}")
    role = message["role"]
    if isinstance(role, str) and role in _UNSUPPORTED_ROLES:
        raise RequestError("unsupported_parameter", f"'{param}.role' {role!r} is not supported", f"{param}.role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{param}.role", role, "one of " + ", ".join(_ROLES))
    return {"role": _ROLES[role], "content": _check_content(message["content"], f"{param}.content")}


def _check_content(value: Any, param: str) -> str:
    """A string, or a list of text parts, which are joined as they are."""
    if not isinstance(value, list):
        if not isinstance(value, str):
            raise invalid(param, value, "a string or a list of text parts")
        return check_text(value, param)
    texts = []
    for index, part in enumerate(value):
        name = f"{param}.{index}"
        if not isinstance(part, dict):
            raise invalid(name, part, 'an object {"type": "text", "text": ...}')
        check_keys(part, name)
        if not _is(part.get("type"), "text"):
            raise RequestError(
                "unsupported_parameter", f"'{name}.type' is {shown(part.get('type'))}: only 'text' is supported", name
            )
        for extra in part:
            if extra not in ("type", "text"):
                raise RequestError("unknown_parameter", f"'{name}': {shown(extra)} is not a field of a text part", name)
        texts.append(check_text(part.get("text"), f"{name}.text"))
    return "".join(texts)


def _check_prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return check_text(value, "prompt")
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        raise RequestError(
            "unsupported_parameter", f"'prompt' holds {len(value)} prompts: give each its own row", "prompt"
        )
    return check_token_ids(value, "prompt")


def row_seed(run_seed: int, custom_id: str, given: int | None) -> int:
    """The uint64 seed of a row: its own, else one drawn from the run's seed and its custom_id.

    blake2b rather than hash(): the same on every machine, in every process, in every version of Python.
    """
    if given is not None:
        return given % 2**64
    material = (run_seed % 2**64).to_bytes(8, "little") + custom_id.encode()
    return int.from_bytes(hashlib.blake2b(material, digest_size=8, person=b"coremill.seed").digest(), "little")
