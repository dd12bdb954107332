"""The lines of the result file and of the error file.

    {"id": "batch_req_<row key>", "custom_id", "response": {"status_code", "request_id", "body"}, "error", "timing"}

The id leads each line and has one length, so that resuming finds the rows of a file without parsing its bodies.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from coremill.config.errors import RequestError
from coremill.config.request import Kind, SequenceResult

_ID_PREFIX = b'{"id":"batch_req_'
_KEY_END = len(_ID_PREFIX) + 32
_AFTER_KEY = b'","custom_id":"'


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


def key_of_line(line: bytes) -> bytes | None:
    """The row key of a line that result_line or error_line made; None for any other line."""
    if not line.startswith(_ID_PREFIX) or not line.endswith(b"}\n"):
        return None
    if line[_KEY_END : _KEY_END + len(_AFTER_KEY)] != _AFTER_KEY:
        return None
    try:
        return bytes.fromhex(line[len(_ID_PREFIX) : _KEY_END].decode("ascii"))
    except ValueError:
        return None


def find_rows(paths: Iterable[str], keys: Iterable[bytes]) -> dict[bytes, dict[str, Any]]:
    """The lines about these rows in result and error files, by row key; files may be missing."""
    wanted, found = set(keys), {}
    for path in paths:
        if not wanted - found.keys() or not os.path.exists(path):
            continue
        with open(path, "rb") as file:
            for line in file:
                key = key_of_line(line)
                if key in wanted:
                    found[key] = json.loads(line)
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
