"""What passes between the text service and its helper process: frames on two pipes.

    u64 length (little-endian), then that many bytes of msgpack

    to the helper:   settings (a map), then [job, kind, [row, ...]] for each job
    from the helper: ["ready", {...}] or ["failed", class name, message], then [job, [answer, ...]]

A row is a TextRequest as a list; an answer is, by the job's kind, the ids as bytes (int32, machine order), their
count, or the text of a chat; or else an error as [code, message, param].
"""

from __future__ import annotations

import os
import struct
from array import array
from typing import Any, Literal

from coremill.config.errors import RequestError
from coremill.coordinator.text.requests import TextRequest

_LENGTH = struct.Struct("<Q")
_PIECE_BYTES = 1 << 18

Kind = Literal["ids", "count", "render"]


def pack(value: Any) -> bytes:
    import msgpack

    return msgpack.packb(value)


def unpack(data: bytes | memoryview) -> Any:
    import msgpack

    return msgpack.unpackb(data, strict_map_key=False)


def frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def pack_row(request: TextRequest) -> bytes:
    """One request, ready to be put into a job. RequestError when it cannot be sent as it is."""
    try:
        return pack([getattr(request, name) for name in TextRequest.__slots__])
    except UnicodeEncodeError as error:
        raise RequestError(
            "invalid_value", f"the text holds half of a surrogate pair at character {error.start}: not valid Unicode"
        ) from None
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError("invalid_value", f"the request cannot be sent to the text helper: {error}") from None


def pack_job(job: int, kind: Kind, rows: list[bytes]) -> bytes:
    """A job from rows that are packed already."""
    import msgpack

    packer = msgpack.Packer()
    head = packer.pack_array_header(3) + pack(job) + pack(kind) + packer.pack_array_header(len(rows))
    return frame(b"".join([head, *rows]))


def pack_answer(answer: list[int] | str | RequestError, kind: Kind) -> Any:
    if isinstance(answer, RequestError):
        return [answer.code, answer.message, answer.param]
    if isinstance(answer, str):
        return answer
    return len(answer) if kind == "count" else array("i", answer).tobytes()


def unpack_answer(value: Any) -> tuple[int, ...] | int | str | RequestError:
    if isinstance(value, list):
        return RequestError(*value)
    return tuple(array("i", value)) if isinstance(value, bytes) else value


class FrameReader:
    """Cuts a stream of bytes into frames.

    Pieces are read into one buffer, time after time: room for each piece would be taken behind the piece before,
    which still lives then, and the process would grow by a piece with every read.
    """

    def __init__(self) -> None:
        self._piece = bytearray(_PIECE_BYTES)
        self._unread = bytearray()

    def read(self, fd: int) -> list[Any] | None:
        """The frames that the next piece completes, decoded; None at the end. Waits, or raises BlockingIOError."""
        count = os.readv(fd, [self._piece])
        if not count:
            return None
        self._unread += memoryview(self._piece)[:count]
        values = []
        while (end := self._frame_end()) is not None:
            with memoryview(self._unread)[_LENGTH.size : end] as body:
                values.append(unpack(body))
            del self._unread[:end]
        return values

    def _frame_end(self) -> int | None:
        if len(self._unread) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._unread)[0]
        return end if len(self._unread) >= end else None
