"""The queue file: jobs and what came of them, in SQLite. One thread uses it, inside transactions.

    accepted                begun                  ended                 acknowledged, cancelled, kept long enough
       |                      |                      |                         |
    WAITING ------------> BEGUN ---------------> DONE -------------------> SETTLED ------------> (gone)
               ^            |                 the outcome stays           only id and digest     after REMEMBER_S
               '- restart --'                                             stay: it never runs again

A transaction that has been committed survives the end of the process and of the power: write-ahead log, synced at each
commit (synchronous=FULL). The lock is SQLite's exclusive one, held from opening to closing.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from coremill.config.errors import QueueFileError
from coremill.coordinator.queue import lock

APPLICATION_ID = 0x434D4C51  # "CMLQ"
VERSION = 1  # of the tables and of the JSON in them (forms.py)
WAITING, BEGUN, DONE, SETTLED = range(4)
# How long an id is remembered whose job has been acknowledged or cancelled, in seconds.
REMEMBER_S = 30 * 86400.0
# Rows that one transaction tidies up.
_TIDY_ROWS = 5000

_SCHEMA = f"""
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- order of acceptance
    id TEXT NOT NULL UNIQUE,
    digest BLOB NOT NULL,      -- of the request
    state INTEGER NOT NULL,    -- {WAITING} waiting, {BEGUN} begun, {DONE} done, {SETTLED} settled
    priority INTEGER NOT NULL,
    deadline REAL,             -- Unix time; null: none
    request TEXT,              -- JSON, as a line of a batch file; null once settled
    options TEXT,              -- JSON
    outcome TEXT,              -- JSON; null unless done
    place INTEGER,             -- order of ending
    ended REAL                 -- Unix time of the end, or of the settling
);
CREATE INDEX by_state ON jobs (state, place);
CREATE INDEX next ON jobs (priority DESC, number) WHERE state = {WAITING};
CREATE INDEX due ON jobs (deadline) WHERE state = {WAITING} AND deadline IS NOT NULL;
CREATE INDEX old ON jobs (state, ended) WHERE state >= {DONE};
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""


class Row(NamedTuple):
    """A job as it stands in the file. request, options, outcome: JSON."""

    number: int
    id: str
    digest: bytes
    state: int
    request: str | None
    options: str | None
    outcome: str | None


_open: weakref.WeakSet[Store] = weakref.WeakSet()

_ROW = "number, id, digest, state, request, options, outcome"


class Store:
    """An open queue file, or with path None one in memory, which is gone with the process.

    QueueFileError when the file cannot be used: it names the file and what is wrong.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        self._identity: tuple[int, int] | None = None
        with contextlib.ExitStack() as undo:
            if self.path is None:
                self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            else:
                self._db = self._open(self.path)
            undo.callback(self.close)
            with self._errors_named():
                self._prepare()
            undo.pop_all()
        _open.add(self)

    def _open(self, path: Path) -> sqlite3.Connection:
        try:
            _create(path)
            with lock.opening(path) as identity, contextlib.ExitStack() as undo:
                uri = f"{path.absolute().as_uri()}?mode=rw"
                db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=0)
                undo.callback(db.close)
                try:
                    # Exclusive: whoever has written has the file until it closes it; the log needs no shared memory.
                    db.execute("PRAGMA locking_mode = EXCLUSIVE")
                    _check_kind(db, path)
                    db.execute("PRAGMA journal_mode = WAL")
                    db.execute("PRAGMA synchronous = FULL")
                    db.execute("BEGIN IMMEDIATE")
                    db.execute("COMMIT")
                except sqlite3.OperationalError as error:
                    if "locked" not in str(error):
                        raise
                    undo.close()
                    pid = lock.holder(path)
                    who = "another process" if pid is None else f"process {pid}"
                    raise QueueFileError(f"{path} is in use by {who}: a queue has one coordinator") from None
                lock.take(identity)
                self._identity = identity
                undo.pop_all()
                return db
        except BlockingIOError:
            raise QueueFileError(f"{path} is in use by this process already: a queue has one coordinator") from None
        except OSError as error:
            raise QueueFileError(f"{path}: {error.strerror or error}") from None
        except sqlite3.Error as error:
            raise QueueFileError(f"{path} cannot be used as a queue: {error}") from None

    def _prepare(self) -> None:
        if _is_empty(self._db):
            self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        else:
            (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise QueueFileError(f"{self.path} is damaged: {' '.join(verdict.split())}")
            with self.transaction():
                self._db.execute("UPDATE jobs SET state = ? WHERE state = ?", (WAITING, BEGUN))
        (self._place,) = self._db.execute("SELECT coalesce(max(place), 0) FROM jobs").fetchone()

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise QueueFileError(f"{self.path or 'the queue'}: {error}") from error

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it or nothing, and on the disk when it ends. QueueFileError when that is impossible."""
        with self._errors_named():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def close(self) -> None:
        self._db.close()
        if self._identity is not None:
            lock.give_back(self._identity)
            self._identity = None

    # ---- what the results depend on ----

    def about(self) -> dict[str, str]:
        return dict(self._db.execute("SELECT name, value FROM about"))

    def set_about(self, about: dict[str, str]) -> None:
        self._db.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", about.items())

    # ---- jobs ----

    def add(self, id: str, digest: bytes, priority: int, deadline: float | None, request: str, options: str) -> None:
        """A new job, which waits."""
        self._db.execute(
            "INSERT INTO jobs (id, digest, state, priority, deadline, request, options) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (id, digest, WAITING, priority, deadline, request, options),
        )

    def find(self, id: str) -> Row | None:
        row = self._db.execute(f"SELECT {_ROW} FROM jobs WHERE id = ?", (id,)).fetchone()
        return None if row is None else Row(*row)

    def begin(self, limit: int, above: int | None = None) -> list[Row]:
        """The next waiting jobs, which have begun with that: by priority, then in the order of acceptance.
        above: only those of a higher priority."""
        least = "" if above is None else f"AND priority > {above:d}"
        found = self._db.execute(
            f"SELECT {_ROW} FROM jobs WHERE state = {WAITING} {least} ORDER BY priority DESC, number LIMIT ?", (limit,)
        )
        rows = [Row(*row) for row in found]
        self._db.executemany("UPDATE jobs SET state = ? WHERE number = ?", ((BEGUN, row.number) for row in rows))
        return rows

    def end(self, number: int, outcome: str, now: float) -> bool:
        """What came of an unfinished job. False when it is none any more: it was cancelled."""
        done = self._db.execute(
            "UPDATE jobs SET state = ?, outcome = ?, place = ?, ended = ? WHERE number = ? AND state IN (?, ?)",
            (DONE, outcome, self._place + 1, now, number, WAITING, BEGUN),
        )
        self._place += done.rowcount
        return done.rowcount == 1

    def settle(self, id: str, now: float) -> None:
        """Nobody wants to know any more what comes or came of it. Only that it is not to run again stays."""
        self._db.execute(
            "UPDATE jobs SET state = ?, request = NULL, options = NULL, outcome = NULL, ended = ? "
            "WHERE id = ? AND state <> ?",
            (SETTLED, now, id, SETTLED),
        )

    def done_after(self, place: int, limit: int) -> list[tuple[int, str]]:
        """(place, id) of done jobs in the order of their ends, behind this place."""
        query = f"SELECT place, id FROM jobs WHERE state = {DONE} AND place > ? ORDER BY place LIMIT ?"
        return self._db.execute(query, (place, limit)).fetchall()

    def due(self, now: float) -> list[Row]:
        """Waiting jobs whose deadline has passed."""
        query = f"SELECT {_ROW} FROM jobs WHERE state = {WAITING} AND deadline IS NOT NULL AND deadline <= ?"
        return [Row(*row) for row in self._db.execute(query, (now,))]

    def next_deadline(self) -> float | None:
        """Of the waiting jobs, the earliest."""
        query = f"SELECT min(deadline) FROM jobs WHERE state = {WAITING} AND deadline IS NOT NULL"
        return self._db.execute(query).fetchone()[0]

    def tidy(self, now: float, keep: float | None) -> tuple[int, bool]:
        """Settle outcomes kept for longer than `keep` seconds, forget ids settled long ago. (Outcomes settled, whether
        there is more to do.)"""
        num_settled = 0
        if keep is not None:
            num_settled = self._db.execute(
                "UPDATE jobs SET state = ?, request = NULL, options = NULL, outcome = NULL, ended = ? WHERE number IN "
                f"(SELECT number FROM jobs WHERE state = {DONE} AND ended < ? LIMIT {_TIDY_ROWS})",
                (SETTLED, now, now - keep),
            ).rowcount
        num_forgotten = self._db.execute(
            "DELETE FROM jobs WHERE number IN "
            f"(SELECT number FROM jobs WHERE state = {SETTLED} AND ended < ? LIMIT {_TIDY_ROWS})",
            (now - REMEMBER_S,),
        ).rowcount
        return num_settled, max(num_settled, num_forgotten) == _TIDY_ROWS

    def counts(self) -> dict[int, int]:
        """Jobs by state."""
        return dict(self._db.execute("SELECT state, count(*) FROM jobs GROUP BY state"))

    def has_unfinished(self) -> bool:
        query = f"SELECT 1 FROM jobs WHERE state IN ({WAITING}, {BEGUN}) LIMIT 1"
        return self._db.execute(query).fetchone() is not None

    def highest_waiting(self) -> int | None:
        """The highest priority that waits."""
        query = f"SELECT priority FROM jobs WHERE state = {WAITING} ORDER BY priority DESC, number LIMIT 1"
        found = self._db.execute(query).fetchone()
        return None if found is None else found[0]


def _is_empty(db: sqlite3.Connection) -> bool:
    """Of a file that has just been made, or whose maker died on the way."""
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (num_tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return not application and not num_tables


def _check_kind(db: sqlite3.Connection, path: Path) -> None:
    """Before anything is changed in it."""
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if _is_empty(db):
        return
    if application != APPLICATION_ID:
        raise QueueFileError(f"{path} is a SQLite database of another program, not a queue of coremill")
    if version != VERSION:
        raise QueueFileError(f"{path} is a queue of version {version}: this coremill reads version {VERSION}")


def _create(path: Path) -> None:
    """A new file of mode 0600, unless there is one. OSError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise QueueFileError(f"{path} is not a regular file") from None
        if status.st_nlink > 1:  # its log goes by its name
            raise QueueFileError(f"{path} has {status.st_nlink} names (hard links): a queue must have one") from None
        return
    os.close(fd)
    folder = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # its name, too, must survive
    finally:
        os.close(folder)


def _leave_alone_in_child() -> None:
    """Closing a connection after a fork, as its collection would, would write to the parent's file and remove its log:
    in the child it is never collected."""
    import ctypes

    for store in list(_open):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store._db))
    lock.forget_all()


os.register_at_fork(after_in_child=_leave_alone_in_child)
