"""The command that runs one row of a file again, for rows that were set aside because workers died of them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from coremill.config.kinds import Flag
from coremill.config.options import BY_NAME, default_of, of_group

if TYPE_CHECKING:
    from coremill.coordinator.batch.job import BatchOptions

_READERS = {".gz": "zcat", ".zst": "zstdcat"}
# What concerns the run as a whole, not what becomes of a row.
_OF_THE_RUN = {"workers", "max_active", "arena", "profile", "prefix_cache", "lending", "stuck_after"}
_OF_ROWS = ("any_model", "chat", "system", "chat_template")


def reproducing(options: BatchOptions, format: str) -> Callable[[int], str]:
    """For the number of a line: a shell command that runs that row alone, with everything its result depends on.

    format: what the input was found to be.
    """
    settings = ["--format", format, "--workers", "1", *_switches(options)]
    command = f"coremill run - -m {shlex.quote(options.model)} {shlex.join(settings)} -o reproduce.jsonl"
    name = shlex.quote(options.input)
    reader = next((reader for suffix, reader in _READERS.items() if options.input.endswith(suffix)), None)

    def of_line(number: int) -> str:
        pick = f"sed -n '{number}{{p;q}}'"
        if options.input == "-":  # it cannot be had again from here
            return f"{pick} INPUT | {command}"
        return f"{reader} {name} | {pick} | {command}" if reader else f"{pick} {name} | {command}"

    return of_line


def _switches(options: BatchOptions) -> Iterator[str]:
    """Those of the run's options that a row's result depends on and that are not the defaults."""
    for source, group in ((options.engine, "engine"), (options.defaults, "sampling")):
        for option in of_group(group):
            if option.name not in _OF_THE_RUN and "run" in option.verbs:
                yield from _switch(option.name, getattr(source, option.name))
    for name in _OF_ROWS:
        yield from _switch(name, getattr(options, name))


def _switch(name: str, value: Any) -> Iterator[str]:
    option = BY_NAME[name]
    if value == default_of(name):
        return
    if isinstance(option.kind, Flag):
        yield option.switch if value else option.switch.replace("--", "--no-", 1)
        return
    yield option.switch
    if isinstance(value, tuple):
        import json

        yield json.dumps(list(value))
    else:
        yield str(value)
