"""The lines of the result file and of the error file.

    {"id": "batch_req_<row key>", "custom_id", "response": {"status_code", "request_id", "body"}, "error", "timing"}

The id leads each line and has one length, so that resuming finds the rows of a file without parsing its bodies.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from coremill.config.errors import RequestError
from coremill.config.request import Kind, SequenceResult

LINE_START = b'{"id":"batch_req_'
# The two ends of a line tell rows that ran from rows that failed, and whole lines from others. What lies between may
# be long, and is not parsed.
_HEAD = re.compile(
    LINE_START + rb'([0-9a-f]{32})","custom_id":"[^"\\]*(?:\\.[^"\\]*)*","response":'
    rb'(?:(null,"error":\{"code":")|\{"status_code":)'
)
_TAIL = re.compile(rb'\}(,"error":null)?,"timing":(?:null|\{[^{}]*\})\}\n\Z')
_MAX_TAIL_BYTES = 400


@dataclass(slots=True)
class Row:
    """A row of the input between being read and being written. ordinal: place among the rows that get a line in
    this run; key and digest: see rowtable; cost: bytes it counts for in the window."""

    number: int
    ordinal: int
    custom_id: str
    key: bytes
    digest: bytes
    cost: int
    kind: Kind = "chat"
    num_prompt: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """A finished row, ready to be written: its line goes to OUT or, failed, to the error file."""

    key: bytes
    digest: bytes
    failed: bool
    line: bytes


def row_of_line(line: bytes) -> tuple[bytes, bool] | None:
    """(row key, whether it failed) of a line that result_line or error_line made; None for any other line."""
    head, tail = _HEAD.match(line), _TAIL.search(line, max(0, len(line) - _MAX_TAIL_BYTES))
    if head is None or tail is None:
        return None
    failed = head[2] is not None
    return None if failed == (tail[1] is not None) else (bytes.fromhex(head[1].decode()), failed)


def error_of_line(line: bytes) -> RequestError | None:
    """The error of a line that error_line made; None for one of result_line."""
    error = json.loads(line)["error"]
    return error and RequestError(error["code"], error["message"])


def find_rows(paths: Iterable[str], keys: Iterable[bytes]) -> dict[bytes, dict[str, Any]]:
    """The lines about these rows in result and error files, by row key; files may be missing."""
    wanted, found = set(keys), {}
    for path in paths:
        if not wanted - found.keys() or not os.path.exists(path):
            continue
        with open(path, "rb") as file:
            for line in file:
                row = row_of_line(line)
                if row and row[0] in wanted:
                    found[row[0]] = json.loads(line)
    return found


class LineMaker:
    """Makes lines for rows of one run. model: the name shown in bodies. reproducing: for the number of a line the
    command that runs it alone, told with rows that workers died of."""

    def __init__(self, model: str, fingerprint: str, reproducing: Callable[[int], str] | None = None) -> None:
        self._model = model
        self._fingerprint = fingerprint
        self._reproducing = reproducing

    def result_line(self, row: Row, result: SequenceResult) -> bytes:
        """A row that ran to its end."""
        response = {
            "status_code": 200,
            "request_id": f"req_{row.key.hex()[:24]}",
            "body": self._body(row, result),
        }
        return _line(row, response, None, _timing(result))

    def error_line(self, row: Row, error: RequestError, result: SequenceResult | None = None) -> bytes:
        """A row that failed, before it ran or (result given) while it did."""
        message = error.message
        if error.code == "worker_crashed" and self._reproducing is not None:
            message += f"; this runs it alone: {self._reproducing(row.number)}"
        shown = {"code": error.code, "message": message, "param": error.param, "line": row.number}
        return _line(row, None, shown, None if result is None else _timing(result))

    def _body(self, row: Row, result: SequenceResult) -> dict[str, Any]:
        chat = row.kind == "chat"
        content = {"message": {"role": "assistant", "content": result.text}} if chat else {"text": result.text}
        num_completion = len(result.token_ids)
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{row.key.hex()[:24]}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": result.finish_reason}],
            "usage": {
                "prompt_tokens": row.num_prompt,
                "completion_tokens": num_completion,
                "total_tokens": row.num_prompt + num_completion,
                "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
            },
        }


def _timing(result: SequenceResult) -> dict[str, Any]:
    return {
        "queued_seconds": round(result.queued_s, 6),
        "prefill_seconds": round(result.prefill_s, 6),
        "decode_seconds": round(result.decode_s, 6),
        "worker": result.worker,
        "cached_tokens": result.cached_tokens,
    }


def _line(row: Row, response: dict | None, error: dict | None, timing: dict | None) -> bytes:
    made = {
        "id": f"batch_req_{row.key.hex()}",
        "custom_id": row.custom_id,
        "response": response,
        "error": error,
        "timing": timing,
    }
    try:
        return json.dumps(made, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    except UnicodeEncodeError:  # an error that quotes half a surrogate pair: JSON can spell it, UTF-8 cannot
        return json.dumps(made, separators=(",", ":")).encode() + b"\n"
