"""One shared page per worker: it counts, everybody may look, and what it counted outlives it.

The page is made by the coordinator and belongs to a worker's place, not to one process: after a restart the
numbers go on. Each is a native uint64 with one writer, so reads need no lock.
"""

from __future__ import annotations

import mmap
import os

from coremill.config.errors import UnsupportedHostError

PAGE_BYTES = 4096
# Order is the layout. `operations` is bumped by native code at every operation of a step; it must be the first.
NAMES = (
    "operations",
    "steps",  # calls of the native step
    "step_rows",  # rows of all steps
    "step_sequences",  # sequences of all steps
    "prefill_tokens",  # tokens of prompts read, and of completions read again
    "decode_tokens",  # tokens chosen
    "busy_ns",  # time inside steps
    "active",  # sequences held now
    "borrowed_steps",  # steps in which cores of other workers took part
    "kv_positions",  # positions whose keys and values the sequences of all steps have read
    "alone_lease",  # lease that has the present step for itself, else 0
)
# A page is called this and the number of its worker.
PAGE_NAME = "coremill-counters-"
_INDEX = {name: index for index, name in enumerate(NAMES)}


def create_page(name: str) -> int:
    """Descriptor of a zeroed page; close-on-exec, so it reaches only children it is passed to."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError as error:
        raise UnsupportedHostError(f"memfd_create: {error.strerror}; shared memory is needed") from error
    os.ftruncate(fd, PAGE_BYTES)
    return fd


class CounterPage:
    """The page behind a descriptor. `page["steps"] += 1` for its writer, `page.snapshot()` for readers."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._words = memoryview(self._map).cast("Q")

    def __getitem__(self, name: str) -> int:
        return self._words[_INDEX[name]]

    def __setitem__(self, name: str, value: int) -> None:
        self._words[_INDEX[name]] = value

    @property
    def words(self) -> memoryview:
        """All counters, writable, for native code that bumps the first one."""
        return self._words

    def snapshot(self) -> dict[str, int]:
        return dict(zip(NAMES, self._words, strict=False))

    def close(self) -> None:
        self._words.release()
        self._map.close()


def open_pages(pid: int) -> list[CounterPage]:
    """The pages of the engine that another process of this user has, by worker; none when it has no engine. They can
    be read when all who wrote to them are gone, too. OSError when the process is gone, or somebody else's."""
    found: dict[int, str] = {}  # a mapping has a descriptor of its own, so pages are there twice
    for path in (f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")):
        try:
            name = os.readlink(path).removeprefix("/memfd:").removesuffix(" (deleted)")
        except FileNotFoundError:  # closed meanwhile
            continue
        if name.startswith(PAGE_NAME):
            found[int(name.removeprefix(PAGE_NAME))] = path
    pages = []
    for index in sorted(found):
        fd = os.open(found[index], os.O_RDWR)
        pages.append(CounterPage(fd))
        os.close(fd)
    return pages
