"""Texts of models and of foreign files, made safe to show in a terminal."""

from __future__ import annotations

import re

# C0 and C1 controls and DEL move the cursor, colour the screen, set its title, answer queries; the direction
# overrides of Unicode make a text look like another one.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SPACE = re.compile(r"\s+")


def printable(text: str) -> str:
    """`text` on one line without anything a terminal would obey: runs of white space become one space."""
    return _UNSAFE.sub("", _SPACE.sub(" ", text))


def shortened(text: str, width: int) -> str:
    """`printable(text)` cut to `width` characters, the last of which then is an ellipsis."""
    # A text may be huge; white space that collapses is allowed for generously.
    line = printable(text[: 16 * width + 64]).strip()
    return line if len(line) <= width else line[: max(0, width - 1)].rstrip() + "…"


def brief(text: str, most: int = 80) -> str:
    """`text` in the length of a message: what is longer is cut, and ends in three dots."""
    return text if len(text) <= most else text[:most] + "..."
