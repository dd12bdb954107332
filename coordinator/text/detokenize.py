"""From token ids back to text, by bytes.

A token may end in the middle of a character, so bytes are put together first and decoded after. Bytes that
can never become UTF-8 are shown as U+FFFD, one for each longest run that could have started a character (the
WHATWG rule, which is Python's too), so the text does not depend on how the ids were cut into calls.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

_decoder = codecs.getincrementaldecoder("utf-8")


def text_of(ids: Iterable[int], table: Sequence[bytes]) -> str:
    """The text of ids; table is id -> bytes. Raises IndexError for an id outside the table."""
    return b"".join([table[i] for i in ids]).decode(errors="replace")


class TextStream:
    """Text of a sequence as its tokens arrive; the pieces joined are what `text_of` gives for all ids at once.

    Bytes of an unfinished character are held back until it is complete or the sequence ends.
    """

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decoder = _decoder(errors="replace")

    def add(self, token: int) -> str:
        """The text that this token completes, "" when it only begins a character."""
        return self.add_bytes(self._table[token])

    def add_bytes(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def end(self) -> str:
        """What was held back: "" or U+FFFD. The stream starts anew."""
        return self._decoder.decode(b"", final=True)
