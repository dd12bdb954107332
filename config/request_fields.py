"""Checks for single fields of a request: type, range, text that can be encoded.

Each function takes the value as JSON or a Python program gave it (numpy's numbers are numbers too) and the field's
dotted path, returns the value in the form the rest of coremill uses, and raises RequestError("invalid_value") naming
field, value and limit otherwise.
"""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

from coremill.config.errors import RequestError
from coremill.config.printable import brief

MAX_TOKENS_LIMIT = 2**31 - 1
TOKEN_ID_LIMIT = 2**31 - 1
MAX_STOPS = 4
MAX_STOP_BYTES = 1024
MAX_CUSTOM_ID_CHARS = 1024
# OpenAI's limits on `metadata`.
MAX_METADATA_PAIRS, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512


def shown(value: Any) -> str:
    """The value as JSON people would write it, cut to a length that fits a message."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        # str() of an int beyond 4300 digits raises; a value that long is never legal anyway.
        text = str(value) if abs(value) < 10**40 else f"an integer of {value.bit_length()} bits"
    elif isinstance(value, (list, dict)):
        text = f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    elif isinstance(value, str):
        text = repr(value[:60]) + ("..." if len(value) > 60 else "")
    elif isinstance(value, float) and math.isinf(value):  # what Python makes of 1e999
        text = f"{'a negative number' if value < 0 else 'a number'} too large for a float"
    else:
        text = _spelled(value)
    return brief(text, 200)


def _spelled(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # a program's own object may do anything
        return f"a value of type {type(value).__name__}"


def invalid(param: str, value: Any, limit: str) -> RequestError:
    return RequestError("invalid_value", f"'{param}' is {shown(value)}: it must be {limit}", param)


def check_keys(given: dict[Any, Any], param: str) -> None:
    """Programs may have other keys than the strings of JSON."""
    for key in given:
        if not isinstance(key, str):
            raise RequestError("invalid_value", f"'{param}' has the key {shown(key)}: it must be a string", param)


def check_bool(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        raise invalid(param, value, "true or false")
    return value


def check_int(value: Any, param: str, low: int, high: int) -> int:
    """An integer in [low, high]. 3.0 is not an integer here, and neither is true."""
    try:
        number = operator.index(value)
    except Exception:  # TypeError for what is no integer; a program's own object may raise anything
        number = None
    if number is None or isinstance(value, bool) or not low <= number <= high:
        raise invalid(param, value, f"an integer from {low} to {high}")
    return number


def check_number(value: Any, param: str, low: float, high: float) -> float:
    """A finite number in [low, high]."""
    limit = f"a number from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise invalid(param, value, limit)
    try:
        # The comparison comes before float(): a huge int would overflow the conversion.
        number = float(value) if low <= value <= high else math.nan
    except Exception:  # a program's own number
        number = math.nan
    if not math.isfinite(number):
        raise invalid(param, value, limit)
    return number


def check_text(value: Any, param: str, *, max_chars: int | None = None, empty: bool = True) -> str:
    """A string that has a UTF-8 form: JSON can spell lone surrogates, no tokenizer can read them."""
    if not isinstance(value, str):
        raise invalid(param, value, "a string")
    if not value and not empty:
        raise invalid(param, value, "a string of at least one character")
    if max_chars is not None and len(value) > max_chars:
        raise RequestError("invalid_value", f"'{param}' has {len(value)} characters: the limit is {max_chars}", param)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            "invalid_value",
            f"'{param}' holds half of a surrogate pair at character {error.start}: it must be valid Unicode",
            param,
        ) from None
    return value


def check_custom_id(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        raise invalid("custom_id", value, f'a string: write "{shown(value)}" with quotes')
    return check_text(value, "custom_id", max_chars=MAX_CUSTOM_ID_CHARS, empty=False)


def check_stop(value: Any, param: str = "stop") -> tuple[str, ...]:
    """One string or a list of up to four; each non-empty and at most MAX_STOP_BYTES of UTF-8."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple)):
        raise invalid(param, value, f"a string or a list of up to {MAX_STOPS} strings")
    if len(stops) > MAX_STOPS:
        raise RequestError("invalid_value", f"'{param}' has {len(stops)} strings: the limit is {MAX_STOPS}", param)
    for index, stop in enumerate(stops):
        name = param if isinstance(value, str) else f"{param}.{index}"
        num_bytes = len(check_text(stop, name, empty=False).encode())
        if num_bytes > MAX_STOP_BYTES:
            raise RequestError("invalid_value", f"'{name}' has {num_bytes} bytes: the limit is {MAX_STOP_BYTES}", name)
    return tuple(stops)


def check_token_ids(value: Any, param: str) -> tuple[int, ...]:
    """A non-empty list of token ids. Whether the model has such ids is checked where the model is known."""
    if not isinstance(value, (list, tuple)) or not value:
        raise invalid(param, value, "a string or a non-empty list of token ids")
    return tuple(check_int(item, f"{param}.{index}", 0, TOKEN_ID_LIMIT) for index, item in enumerate(value))


def check_metadata(value: Any, param: str = "metadata") -> dict[str, str]:
    """OpenAI's metadata: up to 16 pairs of strings."""
    if not isinstance(value, dict):
        raise invalid(param, value, f"an object of up to {MAX_METADATA_PAIRS} strings")
    if len(value) > MAX_METADATA_PAIRS:
        raise RequestError(
            "invalid_value", f"'{param}' has {len(value)} pairs: the limit is {MAX_METADATA_PAIRS}", param
        )
    for key, item in value.items():
        check_text(key, f"{param} (a key)", max_chars=MAX_METADATA_KEY)
        check_text(item, f"{param}.{key}", max_chars=MAX_METADATA_VALUE)
    return dict(value)
