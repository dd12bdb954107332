"""`coremill top [ADDRESS]`: which coordinator, and in which form it is shown."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from coremill.config.errors import ConfigError, EngineError
from coremill.config.settings import Settings
from coremill.tools.options import Verb, takes

if TYPE_CHECKING:
    from coremill.coordinator.local_socket import Record

# Columns and rows of a picture or of a page that is not on a terminal.
_PAGE = (120, 40)
_MOST_ROWS = 16

_EXAMPLES = [
    ("coremill top", "watch the run or up of this user"),
    ("coremill top 4242", "of several the one with this process id"),
    ("coremill top --once", "one table, also into a file or a pipe"),
    ("coremill top --json | jq .totals.decode_tokens_per_s", "one JSON object a second, until it ends"),
    ("coremill top --once --svg top.svg", "the table as a picture"),
]


@click.command(cls=Verb, examples=_EXAMPLES)
@click.argument("address", metavar="[ADDRESS]", required=False)
@takes("top")
def command(address: str | None, settings: Settings) -> int:
    """Watch the workers of a running `run` or `up` of this user.

    ADDRESS is a process id or ipc://...; it can be left out when only one runs. Watching costs the run nothing that
    can be measured: it reads counters that are there anyway.

    Columns: # worker. cores, MHz, steal: its CPUs, their clock now, the share of their time that the hypervisor gave to
    others. active: rows it holds, of those it may. fill: mean rows of a step, as a share of those. prompt/s, new/s:
    tokens read and generated, over three seconds. busy: share of the time inside steps. GB/s: weights and keys and
    values that its steps read, by counting; of max: against its share of what this machine reads from memory at best,
    which `coremill doctor` measures and remembers. PSS: memory, what is shared being split among those who share it;
    weights, arena, own: its parts. blocks: of the KV arena, in use by its rows. hits: share of prompt tokens that were
    found computed. restarts: how often it was started again.

    Keys: s and S choose the column to sort by, r turns the order round, arrows scroll, p pauses and goes on, c cancels
    a row by its id, + and - and w change the number of workers, q leaves.
    """
    from coremill.tools.top.feed import Feed

    picture = settings["svg"]
    if picture is not None:
        from coremill.tools.top.picture import check_picture

        check_picture(picture)
    found = _find(address)
    once = settings["once"] or picture is not None
    interactive = not (once or settings["json"]) and _is_terminal()
    with Feed(found, settings["interval"]) as feed:
        if settings["json"]:
            return _print_json(feed, once)
        if interactive:
            from coremill.tools.top.app import App

            return App(feed).run()
        return _print_once(feed, picture)


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _find(address: str | None) -> str:
    """The address to attach to. EngineError when there is none; ConfigError when there are several."""
    from coremill.coordinator.local_socket import running

    if address is not None and not address.isdecimal():
        return address
    records = running()
    if address is not None:
        for record in records:
            if record.pid == int(address):
                return record.address
        there = ", ".join(str(record.pid) for record in records) or "none"
        raise EngineError(f"no run or up of yours has process id {address}; running: {there}")
    if not records:
        raise EngineError("no run or up of yours is running")
    if len(records) == 1:
        return records[0].address
    click.echo("\n".join(_record_lines(records)), err=True)
    raise ConfigError("several are running; choose one by its process id: coremill top PID")


def _record_lines(records: Sequence[Record]) -> list[str]:
    from coremill.config.printable import shortened
    from coremill.coordinator.batch.plan import format_seconds

    now = time.time()
    ages = [format_seconds(max(0.0, now - record.started)) for record in records]
    return [
        f"  {record.pid:>8}  {record.kind:<5}  {shortened(record.model, 40)}, for {age}"
        for record, age in zip(records, ages, strict=True)
    ]


def _print_json(feed: Any, once: bool) -> int:
    """One object per refresh, until the coordinator ends."""
    from coremill.coordinator.view.handlers import MOST_ROWS

    for view in feed.views(rows=MOST_ROWS, once=once):
        click.echo(json.dumps(view))
        sys.stdout.flush()
    return 0


def _print_once(feed: Any, picture: str | None) -> int:
    from coremill.coordinator.view.screen import whole_lines

    width = shutil.get_terminal_size(_PAGE).columns
    for view in feed.views(rows=_MOST_ROWS, once=True):
        if picture is not None:
            from coremill.tools.top.picture import write_picture

            write_picture(picture, whole_lines(view, width, most_rows=_MOST_ROWS), width)
            click.echo(f"wrote {picture}")
        else:
            _print(whole_lines(view, width, most_rows=_MOST_ROWS))
    return 0


def _print(lines: Sequence[Any]) -> None:
    from coremill.coordinator.view.table import plain

    if not _is_terminal():
        click.echo("\n".join(map(plain, lines)))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    for line in lines:
        console.print(Text.assemble(*line), no_wrap=True)
