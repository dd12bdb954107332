"""The text of a job while it grows, for any number of readers in any threads and event loops."""

from __future__ import annotations

import codecs
import threading
from collections.abc import Callable


class TextStream:
    """Pieces of one text, in order. Bytes come in as tokens end, also in the middle of a character; pieces are cut
    between characters. Joined they are the text of the job's result."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pieces: list[str] = []
        self._ended = False
        self._listeners: list[Callable[[], None]] = []
        self._length = 0  # characters shown
        self._again = 0  # of those, so many have come again since the job was begun anew
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    # ---- whoever runs the job ----

    def restart(self) -> None:
        """The job is begun anew. Its text will be the same, so what has been shown is not shown again."""
        with self._changed:
            self._again = 0
            self._decoder.reset()

    def feed(self, data: bytes) -> None:
        """The next bytes of the text."""
        with self._changed:
            self._take(self._decoder.decode(data))

    def end(self, text: str | None) -> None:
        """Nothing more will come; text: the whole of it, None when the job has no result."""
        with self._changed:
            if text is not None:
                self._again = 0
                self._take(text)
            self._ended = True
            self._tell()

    def _take(self, text: str) -> None:
        """Under the lock: what of `text` is new."""
        known = min(self._length - self._again, len(text))
        self._again += len(text)
        if known < len(text):
            self._pieces.append(text[known:])
            self._length = self._again
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()

    # ---- readers ----

    def after(self, count: int) -> tuple[list[str], bool]:
        """(pieces behind the first `count`, whether these are the last)."""
        with self._changed:
            return self._pieces[count:], self._ended

    def wait(self, count: int, timeout: float | None = None) -> bool:
        """Until there are more than `count` pieces, or the end has come; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or len(self._pieces) > count, timeout)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call it, from any thread, whenever a reader may find something new. It must be quick."""
        with self._changed:
            self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        with self._changed:
            self._listeners.remove(listener)
