"""What may happen to the jobs of a store. Each function is one step of a transaction, and raises RequestError before
it has changed anything."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coremill.config.errors import RequestError
from coremill.config.joboptions import JobOptions, too_late
from coremill.config.request import GenerationRequest
from coremill.coordinator.queue.errand import Follower
from coremill.coordinator.queue.forms import (
    digest_of,
    form_of,
    options_form,
    options_of,
    outcome_form,
    outcome_of,
    request_of,
    to_json,
)
from coremill.coordinator.queue.store import BEGUN, DONE, SETTLED, WAITING, Row, Store

if TYPE_CHECKING:
    from coremill.coordinator.python.job import Completion


class Order:
    """A job to be accepted. What takes time is done on the thread of whoever makes it."""

    __slots__ = ("digest", "follower", "id", "options", "request", "text")

    def __init__(
        self, id: str, request: GenerationRequest, options: JobOptions, follower: Follower | None = None
    ) -> None:
        self.id, self.request, self.options, self.follower = id, request, options, follower
        self.text = to_json(form_of(request))
        self.digest = digest_of(self.text)


def asked(row: Row) -> tuple[GenerationRequest, JobOptions]:
    """What an unsettled job asks."""
    return request_of(json.loads(row.request or "")), options_of(json.loads(row.options or ""))


def outcome(row: Row) -> Completion | RequestError:
    """What came of a done one."""
    return outcome_of(json.loads(row.outcome or ""), asked(row)[0])


def accept(store: Store, orders: Sequence[Order]) -> list[Row | None]:
    """For each order the row that has been there, None for a new one; that is WAITING from now on."""
    found = [store.find(order.id) for order in orders]
    digests: dict[str, bytes] = {}
    for order, row in zip(orders, found, strict=True):
        known = digests.setdefault(order.id, order.digest if row is None else row.digest)
        if known != order.digest:
            text = f"id {order.id!r} is in use by a job with another request: an id names one request"
            raise RequestError("id_in_use", text, "id")
        if row is not None and row.state == SETTLED:
            text = f"job {order.id!r} has been acknowledged or cancelled: its id is not run again"
            raise RequestError("job_settled", text, "id")
    added: set[str] = set()
    for at, (order, row) in enumerate(zip(orders, found, strict=True)):
        if order.id in added:  # twice among these
            found[at] = store.find(order.id)
        elif row is None:
            options = order.options
            form = to_json(options_form(options))
            store.add(order.id, order.digest, options.priority, options.deadline, order.text, form)
            added.add(order.id)
    return found


def find(store: Store, id: str) -> Row:
    """RequestError "job_not_found" also for one whose outcome has been forgotten."""
    row = store.find(id)
    if row is None or row.state == SETTLED:
        raise RequestError("job_not_found", f"there is no job {id!r}, or it has been acknowledged or cancelled", "id")
    return row


def forget(store: Store, id: str) -> Row | None:
    """Whatever it is. None when there is nothing to forget."""
    row = store.find(id)
    if row is None or row.state == SETTLED:
        return None
    store.settle(id, time.time())
    return row


def acknowledge(store: Store, ids: Sequence[str]) -> list[str]:
    """Forget done jobs, all or none; those that were there. RequestError "job_not_found", "job_unfinished"."""
    settled = []
    for id in dict.fromkeys(ids):
        row = store.find(id)
        if row is None:
            raise RequestError("job_not_found", f"there is no job {id!r}", "id")
        if row.state in (WAITING, BEGUN):
            raise RequestError("job_unfinished", f"job {id!r} is not done: there is nothing to acknowledge", "id")
        if row.state == DONE:
            settled.append(id)
    for id in settled:
        store.settle(id, time.time())
    return settled


def expire(store: Store) -> list[tuple[Row, RequestError]]:
    """End waiting jobs whose deadline has passed."""
    now, ended = time.time(), []
    for row in store.due(now):
        error = too_late(JobOptions(deadline=now), now)
        store.end(row.number, to_json(outcome_form(error)), now)
        ended.append((row, error))
    return ended
