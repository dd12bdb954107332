"""Who reads outcomes: each is given to one reader at a time, until it is acknowledged or the reader is gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

from coremill.coordinator.queue.store import DONE, Row, Store

# Of one answer, beyond its first outcome: characters of requests and outcomes.
_MAX_CHARS = 8 << 20


class Readers:
    """For one thread, outside of transactions. A reader is a name."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._place = 0  # outcomes up to here have been given to somebody
        self._returned: deque[str] = deque()  # and these, to somebody who is gone
        self._held: dict[str, dict[str, None]] = {}
        self._holder: dict[str, str] = {}
        self._asking: deque[tuple[str, int, Future[list[Row]]]] = deque()

    def ask(self, reader: str, limit: int, answer: Future[list[Row]]) -> None:
        """At least one outcome and at most `limit`, now or at the serve() that finds one."""
        self._asking.append((reader, limit, answer))
        self.serve()

    def serve(self) -> None:
        """Give what there is to those who ask, the first first."""
        while self._asking:
            reader, limit, answer = self._asking[0]
            if answer.cancelled():
                self._asking.popleft()
                continue
            rows = self._next(limit)
            if not rows:
                return
            self._asking.popleft()
            if answer.set_running_or_notify_cancel():
                for row in rows:
                    self._held.setdefault(reader, {})[row.id] = None
                    self._holder[row.id] = reader
                answer.set_result(rows)
            else:
                self._returned.extend(row.id for row in rows)

    def _next(self, limit: int) -> list[Row]:
        rows: list[Row] = []
        num_chars = 0
        while self._returned and len(rows) < limit and num_chars < _MAX_CHARS:
            row = self._store.find(self._returned.popleft())
            if row is not None and row.state == DONE:
                rows.append(row)
                num_chars += _length(row)
        for place, id in self._store.done_after(self._place, limit - len(rows)):
            if num_chars >= _MAX_CHARS:
                break
            row = self._store.find(id)
            self._place = place
            if row is not None:
                rows.append(row)
                num_chars += _length(row)
        return rows

    def forget(self, ids: Iterable[str]) -> None:
        """They have been acknowledged."""
        for id in ids:
            reader = self._holder.pop(id, None)
            if reader is not None:
                held = self._held[reader]
                del held[id]
                if not held:
                    del self._held[reader]

    def release(self, reader: str) -> None:
        """It is gone: what it has not acknowledged goes to others."""
        self._asking = deque(asked for asked in self._asking if asked[0] != reader)
        held = self._held.pop(reader, {})
        for id in held:
            del self._holder[id]
        self._returned.extend(held)

    def close(self, error: Exception) -> None:
        """Nobody gets anything any more."""
        for _, _, answer in self._asking:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
        self._asking.clear()


def _length(row: Row) -> int:
    return len(row.request or "") + len(row.outcome or "")
