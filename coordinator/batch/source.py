"""Opens the input of a run: a file or standard input, plain, gzip or Zstandard.

The compression is told by the name (.gz, .zst); standard input has no name, so there the first bytes tell it
(neither format begins like UTF-8). A name and content that disagree are an error; so is a compressed file that
ends early.
"""

from __future__ import annotations

import io
import os
import select
import stat
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from coremill.config.errors import RunError

_COMPRESSED = {".gz": ("gzip", b"\x1f\x8b"), ".zst": ("Zstandard", b"\x28\xb5\x2f\xfd")}
STDIN_NAME = "standard input"


class Source:
    """An opened input; nothing is read before `stream` is first asked for (a pipe may have nothing yet).

    name: for people. identity: (device, inode). size: bytes on disk, None for a pipe.
    suffix: of the name without the compression's, lower case; "" for standard input.
    """

    def __init__(self, name: str, raw: io.RawIOBase, suffixes: list[str]) -> None:
        self.name = name
        self._raw = raw
        status = os.fstat(raw.fileno())
        self.identity = (status.st_dev, status.st_ino)
        self.size = status.st_size if stat.S_ISREG(status.st_mode) else None
        self._packing = suffixes.pop() if suffixes and suffixes[-1] in _COMPRESSED else ""
        self.suffix = suffixes[-1] if suffixes else ""

    @cached_property
    def stream(self) -> io.BufferedReader:
        """The content as bytes. RunError when name and content disagree about compression."""
        buffered = io.BufferedReader(self._raw, 1 << 18)  # type: ignore[arg-type]
        start = buffered.peek(4)
        found = next((suffix for suffix, (_, magic) in _COMPRESSED.items() if start.startswith(magic)), "")
        if self.name != STDIN_NAME and found != self._packing:
            if found:
                raise RunError(f"{self.name} is {_COMPRESSED[found][0]}: its name must end in {found}")
            raise RunError(f"{self.name} is not {_COMPRESSED[self._packing][0]}, as its name says")
        return io.BufferedReader(UnpackingReader(buffered, found), 1 << 18) if found else buffered

    @property
    def is_terminal(self) -> bool:
        """Somebody types it."""
        return self._raw.isatty()

    @property
    def compressed(self) -> bool:
        """Known once `stream` was asked for."""
        return not isinstance(self.stream.raw, (io.FileIO, PipeReader))

    def position(self) -> int:
        """Bytes of a regular file (compressed bytes of a compressed one) read so far."""
        return self._raw.tell()

    def check_length(self) -> None:
        """RunError when somebody has made the file shorter: its last line now may be half a line."""
        if self.size is not None and os.fstat(self._raw.fileno()).st_size < self.size:
            raise RunError(f"{self.name} has become shorter while it was read: run again when it is complete")

    def interrupt(self) -> None:
        """Ends a read that waits for more on a pipe, from any thread; the content then ends where it is."""
        if isinstance(self._raw, PipeReader):
            self._raw.interrupt()

    def close(self) -> None:
        self._raw.close()


def open_source(path: str) -> Source:
    """Opens `path`, `-` being standard input. RunError when that is impossible."""
    try:
        if path == "-":
            # A descriptor of its own: closing it must not close standard input for everybody.
            return Source(STDIN_NAME, _raw_file(os.dup(0)), [])
        if os.path.isdir(path):
            raise RunError(f"the input {path} is a folder: give one file")
        raw = _raw_file(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise RunError(f"cannot read the input {path}: {error.strerror}") from None
    try:
        return Source(path, raw, [suffix.lower() for suffix in Path(path).suffixes])
    except BaseException:
        raw.close()
        raise


def _raw_file(fd: int) -> io.RawIOBase:
    return io.FileIO(fd, "rb") if stat.S_ISREG(os.fstat(fd).st_mode) else PipeReader(fd)


class PipeReader(io.RawIOBase):
    """Reads a pipe or terminal that may stay silent, without tying the reading thread to it for good."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def readinto(self, buffer) -> int:
        if any(fd == self._wake for fd, _ in self._poll.poll()):
            return 0
        return os.readv(self._fd, [buffer])

    def interrupt(self) -> None:
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)
            os.close(self._wake)


class UnpackingReader(io.RawIOBase):
    """Content of a compressed file of one or more members (gzip) or frames (Zstandard).

    Everything that could be decompressed is given before EOFError says what is missing: rows in front of the damage
    can be run. Python's gzip would keep some of it for itself, zstandard takes a file cut short for a complete one.
    Input goes in by small pieces because a few bytes may decompress to 128 KiB.
    """

    PIECE = 1024

    def __init__(self, source: BinaryIO, suffix: str) -> None:
        self._source = source
        self._kind = _COMPRESSED[suffix][0]
        if suffix == ".gz":
            import zlib

            self._error, self._padding = zlib.error, b"\0"
            self._open_member = lambda: zlib.decompressobj(wbits=31)
        else:
            import zstandard

            self._error, self._padding = zstandard.ZstdError, b""
            self._open_member = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj
        self._member: Any = None
        self._ready = memoryview(b"")
        self._failure: EOFError | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            piece = self._source.read(self.PIECE)
            if not piece:
                if self._member is not None:
                    raise EOFError(f"the {self._kind} data ends too early")
                return 0
            self._ready = memoryview(self._decompress(piece))
        num = min(len(buffer), len(self._ready))
        buffer[:num] = self._ready[:num]
        self._ready = self._ready[num:]
        return num

    def _decompress(self, piece: bytes) -> bytes:
        made = []
        try:
            while piece:
                if self._member is None:
                    piece = piece.lstrip(self._padding) if self._padding else piece
                    if not piece:
                        break
                    self._member = self._open_member()
                made.append(self._member.decompress(piece))
                if not self._member.eof:
                    break
                piece, self._member = self._member.unused_data, None
        except self._error as error:
            self._failure = EOFError(f"damaged {self._kind} data: {error}")
        return b"".join(made)
