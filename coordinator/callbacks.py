"""Functions of people who use us, called on threads of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def call_back(name: str, callback: Callable[[Any], Any], argument: Any) -> None:
    """Call it. What it raises is its author's affair and goes to the log: it must not stop everybody's engine, nor
    may SystemExit and KeyboardInterrupt, which are meant for threads that are not ours."""
    try:
        callback(argument)
    except BaseException:
        import logging

        logging.getLogger("coremill").exception("%s, told %r, raised", name, argument)
