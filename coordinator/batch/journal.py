"""OUT.journal: what the results in OUT depend on, and which line of input each finished row came from.

    line 1   {"coremill_journal": 1, "started": time, "errors": name of the error file, "fingerprint": {...}}
    then     <key of a row, 32 hex> <digest of its input line, 14 hex>

Written in this order: header (synced) before any row; a row's record before its line in OUT or the error file. So every
row in those files has its record, and OUT and the error file alone say which rows are finished.
"""

from __future__ import annotations

import datetime
import json
import os
from typing import Any

from coremill.config.errors import ResumeRefusedError, RunError
from coremill.coordinator.batch.rowtable import RowTable

JOURNAL_VERSION = 1
_HEADER_START = b'{"coremill_journal":'
_KEY_HEX, _DIGEST_HEX = 32, 14
_RECORD_LEN = _KEY_HEX + 1 + _DIGEST_HEX + 1

# How the parts of a fingerprint are called in front of people.
_NAMES = {
    "model": "the model's content", "kv": "--kv", "ctx": "--ctx", "seed": "--seed", "temperature": "--temperature",
    "top_p": "--top-p", "top_k": "--top-k", "min_p": "--min-p", "max_tokens": "--max-tokens", "stop": "--stop",
    "chat": "--chat", "system": "--system",
    "template": "the chat template", "numerics": "the numerics version", "format": "the input's format",
}  # fmt: skip


def header_line(fingerprint: dict[str, Any], errors: str, started: datetime.datetime) -> bytes:
    header = {
        "coremill_journal": JOURNAL_VERSION,
        "started": started.isoformat(timespec="seconds"),
        "errors": errors,
        "fingerprint": fingerprint,
    }
    return json.dumps(header, separators=(",", ":")).encode() + b"\n"


def record_line(key: bytes, digest: bytes) -> bytes:
    return f"{key.hex()} {digest.hex()}\n".encode()


def is_torn(tail: bytes, start: bytes) -> bool:
    """Whether the end of a file may be what a crash left of a line that begins with `start`."""
    kept = tail.rstrip(b"\0")  # where data never reached the disk
    return kept.startswith(start) or start.startswith(kept)


def read_header(line: bytes, path: str) -> dict[str, Any] | None:
    """The header; None when the line is missing or torn. RunError when the file is something else."""
    stranger = RunError(f"{path} is not a journal of coremill: move it away or choose another -o")
    if not line.endswith(b"\n"):
        if not is_torn(line, _HEADER_START):
            raise stranger
        return None
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or not isinstance(header.get("fingerprint"), dict):
        raise stranger
    if header.get("coremill_journal") != JOURNAL_VERSION:
        found = header.get("coremill_journal")
        raise RunError(f"{path} has journal version {found}, this coremill reads {JOURNAL_VERSION}: choose another -o")
    try:
        header["started"] = datetime.datetime.fromisoformat(header.get("started"))
    except (TypeError, ValueError):
        raise stranger from None
    return header


def check_fingerprint(out: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    """ResumeRefusedError naming each part that differs, with both values."""
    changes = [
        f"{_NAMES.get(name, name)} was {_shown(old.get(name))} and is {_shown(new.get(name))}"
        for name in dict.fromkeys([*new, *old])
        if old.get(name) != new.get(name)
    ]
    if changes:
        raise ResumeRefusedError(
            f"{out} holds results of a run with other settings: {'; '.join(changes)}. "
            "Use the earlier settings to resume, or another -o to start anew"
        )


def _shown(value: Any) -> str:
    return "not set" if value in (None, []) else json.dumps(value)


def load_digests(fd: int, start: int, table: RowTable) -> int:
    """Gives rows of the table the digests recorded from offset `start` on; returns the length worth keeping.

    Rows that are not in the table were not finished and are skipped. A torn last record is not kept; damage
    elsewhere costs only the digests it hit.
    """
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(start)
        end = start
        for line in file:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            if len(line) != _RECORD_LEN:
                continue
            try:
                key, digest = bytes.fromhex(line[:_KEY_HEX].decode()), bytes.fromhex(line[_KEY_HEX + 1 : -1].decode())
            except ValueError:
                continue
            flags = table.get(key)[1]
            if flags:
                table.put(key, digest, flags)
    return end
