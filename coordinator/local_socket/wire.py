"""What goes through the local socket, as bytes.

    client -> server   [call number, kind, fields]
    server -> client   [call number, true, value] or [call number, false, error]
                       [nil, kind, fields, missed]: an event, and how many before it the client was too slow for

One message is one frame of msgpack. Errors travel by the names of config/errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from coremill.config import errors
from coremill.config.errors import CoremillError, EngineError, RequestError

# Room for the longest request there can be. A larger frame ends the connection before it is in memory.
MAX_FRAME_BYTES = 64 << 20


def packed(message: Sequence[Any]) -> bytes:
    """RequestError "too_large" when it would not be let through, "invalid_value" when msgpack cannot carry it."""
    try:
        data = msgpack.packb(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError("invalid_value", f"cannot be sent: {error}") from None
    if len(data) > MAX_FRAME_BYTES:
        raise RequestError("too_large", f"a message of {len(data)} bytes: at most {MAX_FRAME_BYTES} can be sent")
    return data


def unpacked(frames: Sequence[bytes]) -> list[Any]:
    """The array in the one frame; RequestError "invalid_call" when that is not what there is."""
    if len(frames) != 1:
        raise RequestError("invalid_call", f"{len(frames)} frames: a message is one")
    try:
        message = msgpack.unpackb(frames[0])
    except (ValueError, msgpack.UnpackException) as error:
        raise RequestError("invalid_call", f"{len(frames[0])} bytes that are not msgpack: {error}") from None
    if not isinstance(message, list) or len(message) < 3:
        raise RequestError("invalid_call", "a message is an array of three or more")
    return message


def error_fields(error: BaseException) -> dict[str, Any]:
    """An exception as fields; one that is not ours becomes an EngineError of its name and text."""
    if isinstance(error, RequestError):
        return {"type": "RequestError", "code": error.code, "message": error.message, "param": error.param}
    if isinstance(error, CoremillError) and _takes_text(type(error)):
        return {"type": type(error).__name__, "message": str(error)}
    return {"type": "EngineError", "message": f"{type(error).__name__}: {error}"}


def error_of(fields: Any) -> CoremillError:
    """The exception of `error_fields`."""
    if not isinstance(fields, dict):
        return EngineError(f"an error that cannot be read: {fields!r:.200}")
    kind, message = getattr(errors, str(fields.get("type")), None), str(fields.get("message"))
    if kind is RequestError:
        return RequestError(str(fields.get("code")), message, fields.get("param"))
    if isinstance(kind, type) and issubclass(kind, CoremillError) and _takes_text(kind):
        return kind(message)
    return EngineError(message)


def _takes_text(kind: type[CoremillError]) -> bool:
    return "__init__" not in vars(kind)
