"""OUT.waiting: rows that have finished and that `--in-order` still holds back. With it a death costs none of them.

    line 1   {"coremill_waiting": 1, "fingerprint": digest of what results depend on}
    then     <key of a row, 32 hex> <digest of its input line, 14 hex> <its line for OUT or the error file>

The lock of OUT covers it. It is there while rows wait, and goes with the last of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from typing import Any

from coremill.config.errors import RunError
from coremill.coordinator.batch.journal import is_torn
from coremill.coordinator.batch.results import Record, row_of_line

_START = b'{"coremill_waiting":1,"fingerprint":"'
_KEY_HEX, _DIGEST_HEX = 32, 14
_PREFIX = _KEY_HEX + 1 + _DIGEST_HEX + 1
# Rows that have got their turn stay in the file until they are most of it and this many bytes.
_SLACK_BYTES = 4 << 20


class WaitingRows:
    """The file, and the rows that wait.

    Args:
        fingerprint: what results depend on; rows that waited in a run with another one are forgotten.

    Raises RunError for a file that is something else, or cannot be read or written.
    """

    def __init__(self, path: str, fingerprint: dict[str, Any]) -> None:
        text = json.dumps(fingerprint, sort_keys=True, separators=(",", ":"))
        self._path, self._header = path, _START + hashlib.sha256(text.encode()).hexdigest().encode() + b'"}\n'
        self._lines: dict[bytes, bytes] = {}
        self._fd: int | None = None
        self._size = self._live = 0

    def load(self, is_finished: Callable[[bytes], Any]) -> dict[bytes, Record]:
        """Rows that waited when an earlier run died, by their keys; those that are finished by now are left out."""
        try:
            with open(self._path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise RunError(f"cannot read {self._path}: {error.strerror}") from None
        first, _, rest = data.partition(b"\n")
        self._check_ours(self._path, first)
        found = {}
        for line in BytesIO(rest) if first + b"\n" == self._header else ():
            row = row_of_line(line[_PREFIX:])
            if row is None or not line.startswith(row[0].hex().encode()) or is_finished(row[0]):
                continue  # torn, or in OUT already
            digest = bytes.fromhex(line[_KEY_HEX + 1 : _PREFIX - 1].decode())
            found[row[0]] = Record(row[0], digest, row[1], line[_PREFIX:])
        self._lines = {key: _line(row) for key, row in found.items()}
        self._live = sum(map(len, self._lines.values()))
        self._rewrite()  # also when there are none: then it goes when this is closed
        return found

    def keep(self, records: Sequence[Record]) -> None:
        """Once this returns they survive the death of any process."""
        if not records:
            return
        lines = {record.key: _line(record) for record in records}
        self._live += sum(len(line) - len(self._lines.get(key, b"")) for key, line in lines.items())
        self._lines |= lines
        if self._fd is None:
            self._rewrite()
        else:
            self._append(b"".join(lines.values()))

    def forget(self, keys: Iterable[bytes]) -> None:
        """They are in OUT or in the error file now, or will run again."""
        for key in keys:
            self._live -= len(self._lines.pop(key, b""))
        if self._size > 2 * self._live + _SLACK_BYTES:
            self._rewrite()

    def _check_ours(self, path: str, begin: bytes) -> None:
        if not is_torn(begin[: len(_START)], _START):
            raise RunError(f"{path} is not of coremill's making: move it away or choose another -o")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            if not self._lines:
                with contextlib.suppress(OSError):  # the next run finds that all of it is in OUT
                    os.unlink(self._path)

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]  # type: ignore[arg-type]
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error.strerror}") from error
        self._size += len(data)

    def _rewrite(self) -> None:
        """A file of what waits, in the place of the old one."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        temporary = f"{self._path}.new"
        try:
            with contextlib.suppress(FileNotFoundError), open(temporary, "rb") as left:  # by a run that died just here
                self._check_ours(temporary, left.readline(len(_START)))
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd, self._size = os.open(temporary, flags, 0o600), 0
            self._append(self._header + b"".join(self._lines.values()))
            os.rename(temporary, self._path)
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error.strerror}") from error


def _line(record: Record) -> bytes:
    return f"{record.key.hex()} {record.digest.hex()} ".encode() + record.line
