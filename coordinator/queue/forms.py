"""Requests and outcomes as plain objects: what the queue file keeps as JSON and the socket carries.

A request has the form of a batch line's body, so that reading one checks it as strictly as any stranger's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from coremill.config.errors import RequestError
from coremill.config.joboptions import MAX_PRIORITY, MAX_RETRIES, JobOptions
from coremill.config.request import CHAT_URL, COMPLETIONS_URL, GenerationRequest, SamplingParams, parse_body
from coremill.config.request_fields import check_custom_id, check_int, check_number, invalid
from coremill.coordinator.python.job import Completion, Timing, Usage

# ---- requests ----


def form_of(request: GenerationRequest) -> dict[str, Any]:
    """{"custom_id", "url", "body"} of a request; request_of() makes an equal one of it."""
    sampling = request.sampling
    body: dict[str, Any] = {
        name: value for name in _SAMPLING if (value := getattr(sampling, name)) is not None and name != "stop"
    }
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    body["allow_special"] = request.allow_special
    for name in ("model", "user", "metadata"):
        if getattr(request, name) is not None:
            body[name] = getattr(request, name)
    if request.kind == "chat":
        body["messages"] = [dict(message) for message in request.messages or ()]
    else:
        body["prompt"] = list(request.prompt) if isinstance(request.prompt, tuple) else request.prompt
    url = CHAT_URL if request.kind == "chat" else COMPLETIONS_URL
    return {"custom_id": request.custom_id, "url": url, "body": body}


def request_of(form: Any) -> GenerationRequest:
    """RequestError names what is wrong with the form."""
    if not isinstance(form, Mapping) or form.keys() != {"custom_id", "url", "body"}:
        raise invalid("request", form, "an object with custom_id, url and body")
    return parse_body(form["url"], form["body"], custom_id=check_custom_id(form["custom_id"]))


_SAMPLING = tuple(SamplingParams.__dataclass_fields__)


def digest_of(text: str) -> bytes:
    """Of the JSON of a form: equal requests have equal digests."""
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"coremill.job").digest()


def to_json(form: Any) -> str:
    """The same text for equal forms."""
    return json.dumps(form, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def options_form(options: JobOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in JobOptions.__dataclass_fields__}


def options_of(form: Any) -> JobOptions:
    """What options_form() was made of. RequestError when it is not that."""
    if not isinstance(form, Mapping) or form.keys() != JobOptions.__dataclass_fields__.keys():
        raise invalid("options", form, f"an object with {', '.join(JobOptions.__dataclass_fields__)}")
    return JobOptions(
        priority=check_int(form["priority"], "priority", -MAX_PRIORITY, MAX_PRIORITY),
        deadline=None if form["deadline"] is None else check_number(form["deadline"], "deadline", 0, 1e11),
        retries=check_int(form["retries"], "retries", 0, MAX_RETRIES),
        attempt=check_int(form["attempt"], "attempt", 0, MAX_PRIORITY),
    )


# ---- outcomes ----


def outcome_form(outcome: Completion | RequestError) -> dict[str, Any]:
    """custom_id and metadata are the request's, and not repeated."""
    if isinstance(outcome, RequestError):
        return {"error": {"code": outcome.code, "message": outcome.message, "param": outcome.param}}
    return {
        "text": outcome.text,
        "token_ids": list(outcome.token_ids),
        "finish_reason": outcome.finish_reason,
        "usage": asdict(outcome.usage),
        "timing": asdict(outcome.timing),
    }


def outcome_of(form: dict[str, Any], request: GenerationRequest) -> Completion | RequestError:
    """What outcome_form() was made of."""
    error = form.get("error")
    if error is not None:
        return RequestError(error["code"], error["message"], error["param"])
    return Completion(
        custom_id=request.custom_id,
        text=form["text"],
        token_ids=tuple(form["token_ids"]),
        finish_reason=form["finish_reason"],
        usage=Usage(**form["usage"]),
        timing=Timing(**form["timing"]),
        metadata=request.metadata,
    )
