"""The text helper as a process: started, written to, read from, reaped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Literal

from coremill.config.errors import EngineError, RequestError
from coremill.coordinator.text import wire

# -P: what lies in the current folder must not stand in for a module of ours.
_COMMAND = (sys.executable, "-P", "-m", "coremill.coordinator.text.helper")
_MAX_THREADS = 4
_LAST_WORDS_BYTES = 1 << 16
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


@dataclass(frozen=True, slots=True)
class Death:
    """Why a helper is gone. words: for a message, after "it"."""

    cause: Literal["time", "memory", "outside", "silence", "crash"]
    words: str

    @property
    def why(self) -> str:
        """For people who are told that the helper died."""
        limits = {"time": "a row took too much time", "memory": "a row took too much memory"}
        return limits.get(self.cause) or f"it {self.words}"

    def as_error(self, time_limit: float, memory_limit: int) -> RequestError:
        """What the row hears that the helper died of. Limits in seconds and bytes."""
        what = "rendering and tokenising the request"
        if self.cause == "time":
            return RequestError("text_time_limit", f"{what} took more than {time_limit:g} s")
        if self.cause == "memory":
            return RequestError("text_memory_limit", f"{what} needs more than {memory_limit >> 20} MiB")
        return RequestError("text_helper_died", f"the text helper died of the request: it {self.words}")


class HelperProcess:
    """One helper, from start to reap. Used by one thread, which must outlive it: the helper dies with that thread.

    Attributes:
        ready: set by the service once the helper said that its tokenizer is loaded.
        input, output: descriptors to poll.
        unsent: whether something waits to be written.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        # A file in memory: a pipe for its last words would have to be read all the time.
        self._words = os.memfd_create("coremill-text-stderr")
        try:
            # A group of its own: Ctrl-C in a terminal is the coordinator's affair.
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                bufsize=0,
                process_group=0,
                env=os.environ | _environment(),
            )
        except OSError as error:
            os.close(self._words)
            raise EngineError(f"the text helper cannot be started: {error}") from error
        self.ready = False
        self.pid = self._process.pid
        self.input, self.output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)
        self._reader = wire.FrameReader()
        self._unsent: list[memoryview] = []
        self.send(wire.frame(wire.pack(settings)))

    @property
    def unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, data: bytes) -> None:
        """Queue bytes and write what the pipe takes."""
        self._unsent.append(memoryview(data))
        self.write()

    def write(self) -> None:
        while self._unsent:
            try:
                written = os.write(self.input, self._unsent[0])
            except BlockingIOError:
                return
            except BrokenPipeError:
                # It is dead; reading will say so.
                self._unsent.clear()
                return
            if written == len(self._unsent[0]):
                del self._unsent[0]
            else:
                self._unsent[0] = self._unsent[0][written:]

    def read(self) -> tuple[bool, list[Any]]:
        """What has arrived, and whether the helper is still there."""
        try:
            values = self._reader.read(self.output)
        except BlockingIOError:
            return True, []
        return values is not None, list(values or ())

    def reap(self) -> Death:
        """Why it died. It has closed its output, so that it is gone or going."""
        status = self._process.wait()
        words = os.pread(self._words, _LAST_WORDS_BYTES, 0).decode(errors="replace")
        self._close()
        return _death_of(status, words)

    def kill(self) -> Death:
        """End it because it does not answer, or is not needed."""
        self._process.kill()
        self._process.wait()
        self._close()
        return Death("silence", "did not answer")

    def _close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        os.close(self._words)


def _environment() -> dict[str, str]:
    """A helper for a few cores: threads and their heaps count against its address space."""
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    return {
        "TOKENIZERS_PARALLELISM": "true",
        "RAYON_NUM_THREADS": str(threads),
        "MALLOC_ARENA_MAX": "2",
        "RUST_BACKTRACE": "0",
    }


def _death_of(status: int, words: str) -> Death:
    last = next((line.strip() for line in reversed(words.splitlines()) if line.strip()), "")
    if status == -signal.SIGALRM:
        return Death("time", "")
    if "MemoryError" in words or "memory allocation of" in words:
        return Death("memory", last)
    if status < 0:
        name = signal.Signals(-status).name
        said = f", saying: {last}" if last else ""
        return Death("outside" if -status in _FROM_OUTSIDE else "crash", f"was ended by {name}{said}")
    return Death("crash", f"exited with status {status}, saying: {last}")
