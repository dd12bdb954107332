"""Checked access to the metadata of a model file, whose values may be of any type."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from coremill.config.errors import UnsupportedModelError
from coremill.config.printable import brief


def is_array(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A value of any type in the length of a message."""
    if is_array(value):
        return f"an array of {len(value)}"
    return brief(repr(value))


class Keys:
    """Checked access to the keys of one architecture: `keys.integer("block_count", 1, 99)`."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture

    def full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def get(self, key: str) -> Any:
        return self.metadata.get(self.full(key))

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.get(key)
        if value is None:
            value = self._default(key, default)
        value = self._uniform(key, value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise UnsupportedModelError(f"{self.full(key)} is {shown(value)}, not a whole number of {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            value = self._default(key, default)
        if not is_number(value) or not math.isfinite(value) or not low <= value <= high:
            raise UnsupportedModelError(f"{self.full(key)} is {shown(value)}, not a number of {low:g} to {high:g}")
        return float(value)

    def _default(self, key: str, default: Any) -> Any:
        if default is None:
            raise UnsupportedModelError(f"{self.full(key)} is missing")
        return default

    def _uniform(self, key: str, value: Any) -> Any:
        """Some files give one number per layer; one packed plan needs them all alike."""
        if not is_array(value):
            return value
        if not value or not all(map(is_number, value)):
            raise UnsupportedModelError(f"{self.full(key)} is {shown(value)}, not a number or one for each layer")
        if any(item != value[0] for item in value):
            raise UnsupportedModelError(f"{self.full(key)} differs between layers, which is not supported")
        return value[0]
