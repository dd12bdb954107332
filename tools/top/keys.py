"""Keys of a terminal, one at a time, and the terminal as it was afterwards."""

from __future__ import annotations

import codecs
import os
import termios
import tty
from collections.abc import Iterator

_SEQUENCES = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[5~": "pageup", b"\x1b[6~": "pagedown",
    b"\x1bOA": "up", b"\x1bOB": "down",
}  # fmt: skip
_NAMES = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", "\x1b": "escape", "\x04": "leave"}


class Keys:
    """Keys typed at a descriptor that is a terminal. Between start() and stop() it neither echoes nor waits for lines;
    Ctrl-C and Ctrl-Z stay signals."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._before = termios.tcgetattr(fd)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def start(self) -> None:
        tty.setcbreak(self.fd, termios.TCSANOW)

    def stop(self) -> None:
        termios.tcsetattr(self.fd, termios.TCSANOW, self._before)

    def read(self) -> list[str] | None:
        """What has been typed: characters and names ("up", "enter", ...). None at the end of the terminal."""
        try:
            data = os.read(self.fd, 4096)
        except OSError:  # hung up
            return None
        return list(self._split(data)) if data else None

    def _split(self, data: bytes) -> Iterator[str]:
        while data:
            for sequence, name in _SEQUENCES.items():
                if data.startswith(sequence):
                    yield name
                    data = data[len(sequence) :]
                    break
            else:
                if data.startswith((b"\x1b[", b"\x1bO")):  # a key that means nothing here
                    end = next((at for at in range(2, len(data)) if 0x40 <= data[at] <= 0x7E), len(data) - 1)
                    data = data[end + 1 :]
                    continue
                for character in self._decoder.decode(data[:1]):
                    yield _NAMES.get(character, character)
                data = data[1:]
