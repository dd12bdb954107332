"""Standard streams that a run outlives.

A stream that was closed before the start is the null device: its number must not go to a file of results. stderr is
what people are told meanwhile: when nobody reads it any more, or its disk is full, the work goes on. stdout is what
was asked for: losing it is an error, once.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def make_steady() -> None:
    """For the start of a process."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number is this one; children inherit it like any standard stream.
            os.set_inheritable(os.open(os.devnull, os.O_WRONLY), True)
    sys.stdout = _text(_Output(1, "wb", closefd=False), sys.stdout, "strict", line_buffering=os.isatty(1))
    sys.stderr = _text(_Talk(2, "wb", closefd=False), sys.stderr, "backslashreplace", line_buffering=True)


def _text(raw: io.FileIO, before: Any, errors: str, line_buffering: bool) -> io.TextIOWrapper:
    """before: the stream as Python made it, which knows the encoding; None when it was closed."""
    if before is not None:
        before.flush()
    encoding = None if before is None else before.encoding
    errors = errors if before is None else before.errors
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=line_buffering)


class _Talk(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or len(data)  # None: a full pipe that does not block
        except OSError:
            return len(data)


class _Output(io.FileIO):
    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            # Python flushes once more at its exit, and would complain then.
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self.fileno())
            raise OSError(error.errno, error.strerror, "standard output") from error
