"""The live table: draws what comes, and does what keys say."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from coremill.config.printable import printable, shortened
from coremill.coordinator.view.handlers import MOST_ROWS
from coremill.coordinator.view.rates import ABSENT
from coremill.coordinator.view.screen import whole_lines
from coremill.coordinator.view.table import SORT_NAMES, Line, cut_line, plain
from coremill.tools.top.feed import Feed, Watcher
from coremill.tools.top.keys import Keys

if TYPE_CHECKING:
    from rich.live import Live

_HELP: Line = [
    ("q", "bold"), (" quit  ", "dim"), ("s S r", "bold"), (" sort  ", "dim"), ("p", "bold"), (" pause  ", "dim"),
    ("c", "bold"), (" cancel a row  ", "dim"), ("+ - w", "bold"), (" workers  ", "dim"), ("↑ ↓", "bold"),
    (" scroll", "dim"),
]  # fmt: skip
_LONGEST_INPUT = 1024


class App:
    """One session at a terminal. run() returns the exit code."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._keys: Keys | None = None
        self._sort, self._descending, self._first = 0, False, 0
        self._message = ""
        # What is being typed, and what to do with it once it has been; None: keys are commands.
        self._question: tuple[str, Callable[[str], None], bool] | None = None
        self._typed = ""
        self._leaving = False
        self._read_end, self._write_end = os.pipe()
        for fd in (self._read_end, self._write_end):
            os.set_blocking(fd, False)
        self._watcher = Watcher(feed, self._wake)

    def run(self) -> int:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False, markup=False, emoji=False)
        with ExitStack() as stack:
            stack.callback(self._watcher.close)
            stack.enter_context(_Signals(self._write_end))
            if sys.stdin.isatty():
                self._keys = Keys(sys.stdin.fileno())
                stack.callback(self._keys.stop)
            while not self._leaving:
                live = Live(console=self._console, screen=True, auto_refresh=False)
                if self._keys:
                    self._keys.start()
                with live:
                    suspended = self._loop(live)
                if suspended:
                    if self._keys:
                        self._keys.stop()
                    os.kill(os.getpid(), signal.SIGSTOP)  # Ctrl-Z; goes on here
        if self._watcher.ended:
            self._say_goodbye()
        return 0

    def _wake(self) -> None:
        """From any thread."""
        try:
            os.write(self._write_end, b"\0")
        except BlockingIOError:  # it is awake
            pass

    def _loop(self, live: Live) -> bool:
        """Until it is to leave, or (True) to be suspended."""
        fds = [self._read_end] + ([self._keys.fd] if self._keys else [])
        self._draw(live)
        while not (self._leaving or self._watcher.ended):
            ready, _, _ = select.select(fds, [], [])
            if self._read_end in ready and signal.SIGTSTP in os.read(self._read_end, 4096):
                return True
            if self._keys and self._keys.fd in ready:
                keys = self._keys.read()
                if keys is None:
                    self._leaving = True
                for key in keys or ():
                    self._press(key)
            self._draw(live)
        self._leaving = True
        return False

    # ---- what is shown ----

    def _draw(self, live: Live) -> None:
        from rich.text import Text

        width, height = self._console.size
        lines = self.lines(width, height)
        live.update(Text("\n").join(Text.assemble(*line) for line in lines), refresh=True)

    def lines(self, width: int, height: int) -> list[Line]:
        """The whole screen."""
        view = self._watcher.view
        self._watcher.rows = min(height, MOST_ROWS)
        body: list[Line] = [[(self._watcher.problem or "looking ...", "")]]
        if view is not None:
            self._first = max(0, min(self._first, len(view["workers"]) - 1))
            order = {"sort": SORT_NAMES[self._sort], "descending": self._descending, "first": self._first}
            body = whole_lines(view, width, height - 2, **order)
        body = body[: max(0, height - 2)]
        body += [[] for _ in range(height - 2 - len(body))]
        return [cut_line(line, width) for line in (*body, self._status(width), _HELP)][-height:]

    def _status(self, width: int) -> Line:
        if self._question is not None:
            question = f"{self._question[0]} "
            typed = printable(self._typed)[-max(8, width - len(question) - 1) :]
            return [(question, "bold"), (typed + "_", "")]
        if self._watcher.problem:
            return [(shortened(self._watcher.problem, 500), "red")]
        return [(shortened(self._message, 500), "yellow")]

    def _say_goodbye(self) -> None:
        """Leaves the last table on the terminal."""
        view = self._watcher.view
        if view is not None:
            print("\n".join(map(plain, whole_lines(view, self._console.width, most_rows=0))))
        print("it has ended")

    # ---- keys ----

    def _press(self, key: str) -> None:
        if self._question is not None:
            self._type(key)
            return
        self._message = ""
        action = {
            "q": self._leave, "leave": self._leave, "r": self._turn_round, "s": lambda: self._sort_by(1),
            "S": lambda: self._sort_by(-1),
            "p": self._pause, "c": self._ask_row, "w": self._ask_workers, "+": lambda: self._add_workers(1),
            "-": lambda: self._add_workers(-1),
            "up": lambda: self._scroll(-1), "down": lambda: self._scroll(1),
            "pageup": lambda: self._scroll(-10), "pagedown": lambda: self._scroll(10),
        }.get(key)  # fmt: skip
        if action is not None:
            action()

    def _type(self, key: str) -> None:
        _, done, one_key = self._question
        if one_key:
            self._question = None
            done(key)
        elif key == "escape":
            self._question = None
        elif key == "enter":
            self._question = None
            done(self._typed)
        elif key == "backspace":
            self._typed = self._typed[:-1]
        elif len(key) == 1 and key.isprintable() and len(self._typed) < _LONGEST_INPUT:
            self._typed += key

    def _ask(self, question: str, done: Callable[[str], None], *, one_key: bool = False) -> None:
        self._question, self._typed = (question, done, one_key), ""

    def _leave(self) -> None:
        self._leaving = True

    def _sort_by(self, step: int) -> None:
        self._sort = (self._sort + step) % len(SORT_NAMES)
        self._message = f"sorted by {SORT_NAMES[self._sort]}"

    def _turn_round(self) -> None:
        self._descending = not self._descending

    def _scroll(self, step: int) -> None:
        self._first += step

    def _pause(self) -> None:
        view = self._watcher.view
        if view is not None:
            paused = not view["paused"]
            self._tell("pause", {"paused": paused}, "pausing" if paused else "going on")

    def _ask_row(self) -> None:
        self._ask("cancel which row (its id, Esc for none)?", self._confirm)

    def _confirm(self, key: str) -> None:
        def confirmed(answer: str) -> None:
            if answer.lower() == "y":
                self._tell("cancel", {"id": key}, f"cancelled {key}")
            else:
                self._message = "nothing was cancelled"

        if key:
            self._ask(f"cancel row {shortened(key, 60)!r}? It counts as failed. y or n:", confirmed, one_key=True)

    def _ask_workers(self) -> None:
        def number(text: str) -> None:
            if text.isdecimal():
                self._tell("workers", {"count": int(text)}, _workers(int(text)))
            elif text:
                self._message = f"not a number: {text}"

        self._ask("how many workers?", number)

    def _add_workers(self, step: int) -> None:
        view = self._watcher.view
        if view is not None:
            present = sum(worker["state"] not in (*ABSENT, "leaving") for worker in view["workers"])
            self._tell("workers", {"count": present + step}, _workers(present + step))

    def _tell(self, kind: str, fields: dict[str, Any], done: str) -> None:
        """Ask the coordinator; what came of it is shown when it comes."""

        def answered(answer: Future) -> None:
            error = None if answer.cancelled() else answer.exception()
            self._message = done if error is None else str(error)
            self._watcher.hurry()
            self._wake()

        try:
            self._feed.ask(kind, fields).add_done_callback(answered)
        except Exception as error:
            self._message = str(error)


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


class _Signals:
    """Resizing and Ctrl-Z come as bytes into a pipe, from which the loop reads them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        self._wakeup = signal.set_wakeup_fd(self._fd, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTSTP, signal.SIGWINCH)}

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
