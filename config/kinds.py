"""Kinds of option values: how each is read from text, checked, and described to people.

`read` takes text (command line, environment), `check` a value that has a type already (TOML, Python). Both
return the value in its final form or raise ValueError; `limit` completes the sentence "it must be ...".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from coremill.config.memory import format_size, parse_size

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Integer:
    low: int
    high: int
    metavar: str = "N"

    @property
    def limit(self) -> str:
        return f"an integer from {self.low} to {self.high}"

    def read(self, text: str) -> int:
        # int() would take "1_000" and other scripts' digits, which nobody means.
        digits = text.strip().removeprefix("-")
        if not digits.isascii() or not digits.isdecimal() or len(digits) > 20:
            raise ValueError
        return self.check(int(text))

    def check(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            raise ValueError
        return value


@dataclass(frozen=True, slots=True)
class Number:
    low: float
    high: float
    metavar: str = "X"

    @property
    def limit(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"

    def read(self, text: str) -> float:
        # float() would take "1_0" and other scripts' digits, which nobody means.
        if not text.isascii() or "_" in text:
            raise ValueError
        return self.check(float(text))

    def check(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError
        if not self.low <= value <= self.high or not math.isfinite(value):
            raise ValueError
        return float(value)


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes; text may have a unit, in powers of 1024."""

    low: int = 1
    high: int = 1 << 50
    metavar: str = "SIZE"

    @property
    def limit(self) -> str:
        return f"a size of {self.low} byte to {format_size(self.high)}, such as 512M or 8G"

    def read(self, text: str) -> int:
        return self.check(parse_size(text))

    def check(self, value: Any) -> int:
        if isinstance(value, str):
            value = parse_size(value)
        return Integer(self.low, self.high).check(value)


@dataclass(frozen=True, slots=True)
class Choice:
    values: tuple[str, ...]

    @property
    def metavar(self) -> str:
        return "|".join(self.values)

    @property
    def limit(self) -> str:
        return "one of " + ", ".join(self.values) if len(self.values) > 1 else repr(self.values[0])

    def read(self, text: str) -> str:
        return self.check(text)

    def check(self, value: Any) -> str:
        if value not in self.values:
            raise ValueError
        return value


@dataclass(frozen=True, slots=True)
class Flag:
    metavar: str = ""

    @property
    def limit(self) -> str:
        return "true or false (1 or 0, yes or no, on or off)"

    def read(self, text: str) -> bool:
        word = text.strip().lower()
        if word not in _TRUE + _FALSE:
            raise ValueError
        return word in _TRUE

    def check(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """Any text but the empty one; also file names, whose existence is checked where they are used."""

    metavar: str = "TEXT"

    @property
    def limit(self) -> str:
        return "a text that is not empty"

    def read(self, text: str) -> str:
        return self.check(text)

    def check(self, value: Any) -> str:
        if hasattr(value, "__fspath__"):
            value = value.__fspath__()
        if not isinstance(value, str) or not value or "\0" in value:
            raise ValueError
        return value


@dataclass(frozen=True, slots=True)
class Stops:
    """Stop strings: one, or a list of them, which text spells as JSON."""

    metavar: str = "TEXT"

    @property
    def limit(self) -> str:
        return "a text that is not empty, or a list of up to 4"

    def read(self, text: str) -> tuple[str, ...]:
        import json

        try:
            value = json.loads(text) if text.startswith("[") else text
        except ValueError:
            value = text  # a stop string such as [/INST]
        return self.check(value)

    def check(self, value: Any) -> tuple[str, ...]:
        from coremill.config.errors import RequestError
        from coremill.config.request_fields import check_stop

        try:
            return check_stop(value)
        except RequestError as error:
            raise ValueError(error.message) from None


Kind = Integer | Number | Size | Choice | Flag | Text | Stops
