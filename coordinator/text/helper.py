"""The text helper: a process that tokenises and renders what is not trusted. Started by TextService only.

    python -P -m coremill.coordinator.text.helper

One thread reads standard input and ends the process when it is closed; the main thread works. Limits are the
kernel's, so no template and no text can talk its way around them: a timer whose signal kills for each job, and an
address space that ends a given number of bytes above what the loaded tokenizer needs. Whoever exceeds a limit
takes the process down, and the service finds out which row that was.
"""

from __future__ import annotations

import gc
import os
import queue
import resource
import signal
import sys
import threading
from typing import Any

from coremill.coordinator.text import wire
from coremill.coordinator.text.prompts import Preparer
from coremill.coordinator.text.requests import TextRequest

_PR_SET_PDEATHSIG = 1
_OUTPUT = 3
# Freed memory that is kept for the next job, bytes.
_KEPT_BYTES = 64 << 20


def main() -> None:
    _tidy_inheritance()
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read_input, args=(inbox,), daemon=True).start()
    settings = inbox.get()
    # The tokenizer is built of tuples by the ten thousand, none of which is ever garbage.
    gc.disable()
    try:
        preparer = _load(settings)
    except Exception as error:
        _send(["failed", type(error).__name__, str(error)])
        return
    gc.freeze()
    gc.enable()
    libc = _libc()
    _die_with_parent(libc, settings["parent"])
    _limit_memory(preparer, settings["memory_limit"])
    usual = _memory_in_use()[1]
    # Last: what fails from here on is charged to a row.
    special = preparer.tokenizer.special
    facts = {name: getattr(special, name) for name in type(special).__slots__}
    _send(["ready", {"vocab_size": preparer.tokenizer.vocab_size, "special": facts}])
    while True:
        _work(preparer, inbox.get(), settings["time_limit"])
        if _memory_in_use()[1] > usual + _KEPT_BYTES:
            libc.malloc_trim(0)


def _load(settings: dict[str, Any]) -> Preparer:
    import datetime

    description = settings["description"]
    if description is None:
        from coremill.native.packfile import open_pack

        pack = open_pack(settings["pack"])
        description = pack.tokenizer
        pack.close()
    now = datetime.datetime.fromisoformat(settings["now"])
    return Preparer(description, now, settings["max_tokens"], settings["template"])


def _tidy_inheritance() -> None:
    """What the parent does with signals and what libraries print must not get in the way."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(1, _OUTPUT)
    os.dup2(2, 1)


def _read_input(inbox: queue.SimpleQueue[Any]) -> None:
    reader, status = wire.FrameReader(), 1
    try:
        while (values := reader.read(0)) is not None:
            for value in values:
                inbox.put(value)
        status = 0
    finally:
        # The service is gone, or what it sent does not fit: either way nobody waits for the main thread.
        os._exit(status)


def _libc() -> Any:
    import ctypes

    return ctypes.CDLL(None)


def _die_with_parent(libc: Any, parent: int) -> None:
    """A second string to the closed pipe: that one needs the interpreter, which a template can keep busy."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _limit_memory(preparer: Preparer, limit: int) -> None:
    """Limit the address space to what is in use now and `limit` bytes more, if it is not limited to less."""
    # Threads start with the first batch; their stacks are not the first request's fault. Of empty texts, as no
    # character is sure to be in the vocabulary.
    preparer.tokenizer.encode_pieces([[""]] * 8)
    most = _memory_in_use()[0] + limit
    now = resource.getrlimit(resource.RLIMIT_AS)[0]
    if now == resource.RLIM_INFINITY or most < now:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _memory_in_use() -> tuple[int, int]:
    """Bytes of address space, bytes of memory."""
    with open("/proc/self/statm") as file:
        pages = file.read().split()
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


def _work(preparer: Preparer, job: Any, time_limit: float) -> None:
    number, kind, rows = job
    signal.setitimer(signal.ITIMER_REAL, time_limit)
    requests = [TextRequest(*row) for row in rows]
    answers = preparer.render_all(requests) if kind == "render" else preparer.prepare(requests)
    packed = [wire.pack_answer(answer, kind) for answer in answers]
    signal.setitimer(signal.ITIMER_REAL, 0)
    _send([number, packed])


def _send(value: Any) -> None:
    data = memoryview(wire.frame(wire.pack(value)))
    while data:
        data = data[os.write(_OUTPUT, data) :]


if __name__ == "__main__":
    sys.exit(main())
