"""The queue file: who may use it, what survives, what is refused."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading

import pytest

from coremill.config.errors import QueueFileError
from coremill.coordinator.queue.store import BEGUN, DONE, REMEMBER_S, SETTLED, WAITING, Store

HOLD = """
import sys
from coremill.coordinator.queue.store import Store
store = Store(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "jobs.sqlite"


def add(store: Store, *ids: str, priority: int = 0, deadline: float | None = None) -> None:
    with store.transaction():
        for id in ids:
            store.add(id, b"d" * 16, priority, deadline, "{}", "{}")


def test_jobs_come_back_as_they_stood(path):
    store = Store(path)
    add(store, "a", "b", "c", "d")
    with store.transaction():
        a, b, c, _ = store.begin(10)
        assert store.end(a.number, "one", 5.0) and not store.end(a.number, "two", 6.0)
        store.settle("b", 7.0)
        assert not store.end(b.number, "late", 8.0)
    assert store.counts() == {DONE: 1, SETTLED: 1, BEGUN: 2}
    store.close()
    store = Store(path)
    assert store.counts() == {DONE: 1, SETTLED: 1, WAITING: 2}
    assert store.find("a").outcome == "one"
    assert store.find("b")[4:] == (None, None, None)
    assert [row.id for row in store.begin(10)] == ["c", "d"]
    assert c.digest == b"d" * 16
    store.close()


def test_what_is_next(path):
    store = Store(path)
    add(store, "low", priority=-1)
    add(store, "first", "second")
    add(store, "high", priority=5)
    with store.transaction():
        assert store.highest_waiting() == 5
        assert [row.id for row in store.begin(1, above=5)] == []
        assert [row.id for row in store.begin(9, above=0)] == ["high"]
        assert [row.id for row in store.begin(2)] == ["first", "second"]
        assert [row.id for row in store.begin(2)] == ["low"]
    store.close()


def test_deadlines_and_what_is_kept_too_long(path):
    store = Store(path)
    add(store, "due", deadline=10.0)
    add(store, "later", deadline=20.0)
    assert store.next_deadline() == 10.0
    with store.transaction():
        assert [row.id for row in store.due(10.0)] == ["due"]
        for row in store.begin(2):
            store.end(row.number, "{}", 30.0 if row.id == "due" else 40.0)
        assert store.next_deadline() is None
        assert store.tidy(45.0, None) == (0, False)
        assert store.tidy(45.0, 10.0) == (1, False)
        assert store.find("due").state == SETTLED and store.find("later").state == DONE
        assert store.done_after(0, 9) == [(2, "later")]
        store.tidy(46.0 + REMEMBER_S, None)
        assert store.find("due") is None and store.find("later").state == DONE
    store.close()


def test_all_of_a_transaction_or_nothing(path):
    store = Store(path)
    with pytest.raises(ZeroDivisionError), store.transaction():
        store.add("a", b"", 0, None, "{}", "{}")
        raise ZeroDivisionError
    assert store.find("a") is None
    with pytest.raises(QueueFileError, match="UNIQUE"), store.transaction():
        store.add("a", b"", 0, None, "{}", "{}")
        store.add("a", b"", 0, None, "{}", "{}")
    assert store.find("a") is None
    store.close()


def test_only_its_owner_may_read_it(path):
    store = Store(path)
    add(store, "a")
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert {file.name for file in path.parent.iterdir()} == {path.name, f"{path.name}-wal"}
    store.close()
    assert list(path.parent.iterdir()) == [path]


def test_every_commit_is_synced(path):
    store = Store(path)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()


def test_one_coordinator_at_a_time_named_by_its_process(path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"open\n"
    with pytest.raises(QueueFileError, match=f"in use by process {holder.pid}:"):
        Store(path)
    link = path.with_name("link.sqlite")
    link.symlink_to(path)
    with pytest.raises(QueueFileError, match=f"in use by process {holder.pid}:"):
        Store(link)
    holder.kill()
    holder.wait()
    store = Store(path)
    with pytest.raises(QueueFileError, match="in use by this process"):
        Store(link)
    store.close()
    Store(link).close()
    holder.communicate()


def test_a_forked_child_leaves_the_file_alone(path):
    """Closing it there would write to the parent's file and remove its log."""
    store = Store(path)
    add(store, "a")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            del store
            try:
                Store(path)
            except QueueFileError as error:
                code = 0 if f"process {os.getppid()}:" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    script = (
        "import os, sys\n"
        "from coremill.coordinator.queue.store import Store\n"
        "store = Store(sys.argv[1])\n"
        "child = os.fork()\n"
        "if child:\n"  # the child ends as any program does
        "    os.waitpid(child, 0)\n"
        "    assert os.path.exists(sys.argv[1] + '-wal')\n"
        "    with store.transaction():\n"
        "        store.add('b', b'', 0, None, '{}', '{}')\n"
        "    print(*(row.id for row in store.begin(9)))\n"
    )
    other = path.with_name("other.sqlite")
    done = subprocess.run([sys.executable, "-c", script, str(other)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("b\n", "")
    assert os.path.exists(f"{path}-wal")
    add(store, "c")
    assert [row.id for row in store.begin(9)] == ["a", "c"]
    store.close()


def test_foreign_files_are_left_as_they_are(path):
    foreign = sqlite3.connect(path)
    foreign.execute("CREATE TABLE mine (a)")
    foreign.commit()
    foreign.close()
    before = path.read_bytes()
    with pytest.raises(QueueFileError, match="SQLite database of another program"):
        Store(path)
    assert path.read_bytes() == before


def test_a_queue_of_another_version(path):
    Store(path).close()
    later = sqlite3.connect(path)
    later.execute("PRAGMA user_version = 99")
    later.close()
    with pytest.raises(QueueFileError, match="queue of version 99: this coremill reads version 1"):
        Store(path)


@pytest.mark.parametrize(
    "content",
    [b"hello", b"\0" * 5000, os.urandom(5000), b"SQLite format 3\0", b"SQLite format 3\0" + b"\xff" * 9000],
    ids=["text", "zeros", "noise", "header", "bad header"],
)
def test_what_is_no_database_is_one_clear_error(path, content):
    path.write_bytes(content)
    with pytest.raises(QueueFileError, match=r"jobs\.sqlite"):
        Store(path)
    assert path.read_bytes() == content


def test_a_damaged_queue_is_one_clear_error(path):
    store = Store(path)
    add(store, *(f"job-{n:04}" * 20 for n in range(500)))
    store.close()
    data = bytearray(path.read_bytes())
    for start in range(4096, len(data), 4096):  # all pages but the first
        data[start + 8 : start + 2000] = os.urandom(1992)
    path.write_bytes(data)
    with pytest.raises(QueueFileError, match=r"damaged|malformed"):
        Store(path)
    path.write_bytes(bytes(data[: len(data) // 2]))
    with pytest.raises(QueueFileError, match=r"jobs\.sqlite"):
        Store(path)


def test_paths_that_cannot_be(path, tmp_path):
    with pytest.raises(QueueFileError, match="not a regular file"):
        Store(tmp_path)
    with pytest.raises(QueueFileError, match="No such file"):
        Store(tmp_path / "missing" / "jobs.sqlite")
    os.mkfifo(path)
    with pytest.raises(QueueFileError, match="not a regular file"):
        Store(path)
    path.unlink()
    Store(path).close()
    os.link(path, tmp_path / "second")
    with pytest.raises(QueueFileError, match="2 names"):
        Store(path)


def test_a_maker_that_died_on_the_way(path):
    path.touch()
    Store(path).close()
    path.unlink()
    started = sqlite3.connect(path)
    started.execute("PRAGMA journal_mode = WAL")
    started.close()
    store = Store(path)
    add(store, "a")
    store.close()


def test_kill_in_the_middle_of_writing(path):
    """Whatever had been said to be written is there; the rest of the transactions are there whole or not at all."""
    script = (
        "import sys\n"
        "from coremill.coordinator.queue.store import Store\n"
        "store = Store(sys.argv[1])\n"
        "for n in range(10**6):\n"
        "    with store.transaction():\n"
        "        store.add(f'{n}a', b'', 0, None, '{}', '{}')\n"
        "        store.add(f'{n}b', b'', 0, None, '{}', '{}')\n"
        "    print(n, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    last = -1
    for line in process.stdout:
        last = int(line)
        if last == 50:
            process.send_signal(signal.SIGKILL)
    process.wait()
    store = Store(path)
    ids = [row.id for row in store.begin(10**7)]
    store.close()
    assert len(ids) % 2 == 0 and len(ids) // 2 in (last + 1, last + 2)
    assert ids == [f"{n // 2}{'ab'[n % 2]}" for n in range(len(ids))]


def test_a_full_disk_refuses_and_loses_nothing(path):
    store = Store(path)
    add(store, "a")
    store._db.execute("PRAGMA max_page_count = 12")
    with pytest.raises(QueueFileError, match="full"):
        add(store, *("x" * 1000 + str(n) for n in range(100)))
    assert [row.id for row in store.begin(9)] == ["a"]
    store.close()


def test_opened_by_many_threads_at_once(path):
    won, refused = [], []

    def attempt() -> None:
        try:
            won.append(Store(path))
        except QueueFileError:
            refused.append(1)

    threads = [threading.Thread(target=attempt) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(refused) == 15
    won[0].close()
