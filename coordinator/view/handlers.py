"""What a coordinator answers to `coremill top` on its local socket (coordinator/local_socket).

glance    {rows}      a snapshot: counters and what is there now (coordinator/figures.py)
pause     {paused}    all sequences rest, or go on
workers   {count}     run on so many core groups
cancel    {id}        end a row
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from coremill.config.errors import RequestError
from coremill.config.request_fields import check_bool, check_int, check_text, shown

if TYPE_CHECKING:
    from coremill.coordinator.engine import Engine

Fields = dict[str, Any]
# Rows of each worker that one look may ask for.
MOST_ROWS = 1024


def watch_handlers(
    engine: Engine, about: Callable[[], Fields] = dict, cancel: Callable[[str], None] | None = None
) -> dict[str, Callable[[Fields], Any]]:
    """The four handlers for an engine.

    about: what the snapshot says beside the engine's own figures: model, kind, pid, seconds, input, output, rows
    (coordinator/batch/watch.py), seconds_left, kept (Keeper.stats). cancel: ends the row of an id, RequestError
    "not_found" when there is none; None: the engine's sequences of that key.
    """

    def glance(fields: Fields) -> Fields:
        rows = check_int(fields.get("rows", 0), "rows", 0, MOST_ROWS)
        return {**engine.glance(rows), **about()}

    def pause(fields: Fields) -> Fields:
        paused = check_bool(fields.get("paused"), "paused")
        engine.pause(paused)
        return {"paused": paused}

    def workers(fields: Fields) -> Fields:
        count = check_int(fields.get("count"), "count", 1, len(engine.groups))
        engine.set_workers(count)
        return {"count": count}

    def cancel_row(fields: Fields) -> Fields:
        key = check_text(fields.get("id"), "id")
        (cancel or (lambda key: cancel_key(engine, key)))(key)
        return {"id": key}

    return {"glance": glance, "pause": pause, "workers": workers, "cancel": cancel_row}


def cancel_key(engine: Engine, key: str) -> None:
    """Cancels the engine's sequences of this key; RequestError "not_found" when there is none."""
    tickets = engine.find(key)
    if not tickets:
        raise RequestError("not_found", f"no row {shown(key)} is waiting or running now", "id")
    for ticket in tickets:
        engine.cancel(ticket)
