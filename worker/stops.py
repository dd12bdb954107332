"""Stop strings, matched on bytes while tokens come in.

A token may end in the middle of a character or of a stop string, or hold several of them. The text is cut before
the stop string that is complete first (of those that end together, the longest), wherever tokens happen to split.

    ....shown....|..held: might become a stop string..|  <- next piece
"""

from __future__ import annotations


class StopMatcher:
    """Decides which bytes of a growing text are certain to be shown."""

    __slots__ = ("_held", "_longest", "_stops")

    def __init__(self, stops: tuple[bytes, ...]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = b""

    def feed(self, piece: bytes) -> tuple[bytes, bool]:
        """(bytes to show now, whether a stop string is complete); nothing may be fed after True."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = b""
            return text[: min(found)[1]], True
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> bytes:
        """What was held back, at the end of a text without a stop string."""
        held, self._held = self._held, b""
        return held

    def _num_held(self, text: bytes) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
