"""Producers, readers, a resident coordinator and its workers, all real processes, killed in random order.

Each client keeps a log of whole lines, "TIME WORD ID TEXT"; from these, and from what is left in the queue at the end,
check() says whether anything was lost, doubled or changed.

    kills.py FOLDER NAME produce | read     (started by World)
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
PATIENCE = 120.0
# Jobs of a producer that are not done yet.
_AHEAD = 20


# ---- clients ----


class Log:
    def __init__(self, folder: Path, name: str) -> None:
        self._fd = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, *words: str) -> None:
        os.write(self._fd, (" ".join((f"{time.monotonic():.6f}", *words)) + "\n").encode())


def lines_of(path: Path) -> list[list[str]]:
    """Whole lines. A text of the make-believe model has no spaces; an empty one is the last word."""
    if not path.exists():
        return []
    return [line.split(" ") for line in path.read_text().split("\n")[:-1]]


def attached(folder: Path):
    """The coordinator that runs now, or the next one."""
    from coremill.config.errors import ConfigError, EngineError
    from coremill.coordinator import Coordinator

    while True:
        try:
            return Coordinator.attach((folder / "address").read_text())
        except (ConfigError, EngineError, TimeoutError, OSError):
            time.sleep(0.01)


def request_of(id: str) -> dict:
    draw = random.Random(id)
    return {"prompt_ids": [draw.randrange(1, 60) for _ in range(draw.randint(1, 40))], "max_tokens": draw.randint(1, 8)}


def produce(folder: Path, name: str) -> None:
    from coremill.config.errors import EngineError, RequestError

    before = lines_of(folder / f"{name}.log")
    log = Log(folder, name)
    accepted = {words[2] for words in before if words[1] == "accepted"}
    open_ids = dict.fromkeys(words[2] for words in before if words[1] == "submitting" and words[2] not in accepted)
    numbers = itertools.count(sum(words[1] == "submitting" for words in before))
    while True:
        c, jobs = attached(folder), []
        try:
            while True:
                id = next(iter(open_ids), None) or f"{name}-{next(numbers)}"
                if id not in open_ids:
                    open_ids[id] = None
                    log("submitting", id)
                try:
                    jobs.append(c.submit(id=id, **request_of(id)))
                except RequestError as error:
                    if error.code != "job_settled":  # it had been accepted, and has been read since
                        raise
                log("accepted", id)
                del open_ids[id]
                if len(jobs) > _AHEAD:
                    jobs.pop(0).result()
        except EngineError:
            c.close()


def read(folder: Path, name: str) -> None:
    from coremill.config.errors import EngineError

    log = Log(folder, name)
    while True:
        c = attached(folder)
        try:
            for job in c.results():
                log("got", job.id, job.result().text)
                job.acknowledge()
                log("acknowledged", job.id)
        except EngineError:
            c.close()


# ---- who kills them ----


class World:
    """All processes on one queue file. pack: of a tiny model."""

    def __init__(self, folder: Path, pack: Path, seed: int, producers: int = 2, readers: int = 2) -> None:
        self.folder, self._pack, self._draw = folder, pack, random.Random(seed)
        self.host: subprocess.Popen | None = None
        self.workers: list[int] = []
        self.clients: dict[str, subprocess.Popen] = {}
        self._kinds = {f"producer{n}": "produce" for n in range(producers)} | {
            f"reader{n}": "read" for n in range(readers)
        }
        self.num_kills: dict[str, int] = defaultdict(int)

    def start_missing(self) -> None:
        if self.host is None or self.host.poll() is not None:
            command = [
                sys.executable,
                str(HERE / "host.py"),
                str(self._pack),
                str(self.folder / "jobs.sqlite"),
                "serve",
            ]
            self.host = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self.workers = []
            for line in self.host.stdout:
                kind, value = line.split()
                if kind == "ready":
                    (self.folder / "address.new").write_text(value)
                    (self.folder / "address.new").rename(self.folder / "address")
                    threading.Thread(target=self._listen, args=(self.host,), daemon=True).start()
                    break
                self.workers.append(int(value))
            else:
                raise AssertionError(f"the coordinator did not start: {self.host.wait()}")
        for name, kind in self._kinds.items():
            if name not in self.clients or self.clients[name].poll() is not None:
                command = [sys.executable, str(HERE / "kills.py"), str(self.folder), name, kind]
                self.clients[name] = subprocess.Popen(command)

    def _listen(self, host: subprocess.Popen) -> None:
        for line in host.stdout:
            self.workers.append(int(line.split()[1]))

    def wait_for_progress(self) -> None:
        """Every client gets something done."""
        before = {name: len(lines_of(self.folder / f"{name}.log")) for name in self._kinds}
        deadline = time.monotonic() + PATIENCE
        while any(len(lines_of(self.folder / f"{name}.log")) < count + 6 for name, count in before.items()):
            assert time.monotonic() < deadline, "nothing moves any more"
            assert self.host.poll() is None, "the coordinator has ended by itself"
            for name, process in self.clients.items():
                assert process.poll() is None, f"{name} has ended by itself"
            time.sleep(0.01)

    def kill_some(self) -> None:
        """One to all of them, in random order."""
        victims = self._draw.sample(
            ["coordinator", "worker", *self.clients], self._draw.randint(1, 2 + len(self.clients))
        )
        for victim in victims:
            self.num_kills[victim.rstrip("0123456789")] += 1
            if victim == "coordinator":
                self.host.kill()
            elif victim == "worker":
                self._kill_worker()
            else:
                self.clients[victim].kill()
            time.sleep(self._draw.choice([0, 0, 0.001, 0.02]))
        if "coordinator" in victims:
            self.host.wait()
        for victim in victims:
            if victim in self.clients:
                self.clients[victim].wait()

    def _kill_worker(self) -> None:
        pid = self._draw.choice(self.workers)
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"fake_worker" in file.read():  # it still is what it was
                    os.kill(pid, 9)
        except OSError:
            pass

    def stop(self) -> None:
        for process in (*self.clients.values(), *([self.host] if self.host else [])):
            process.kill()
            process.wait()
        if self.host is not None:
            self.host.stdout.close()

    def finish(self) -> dict[str, str]:
        """Run what is left; outcomes that nobody has acknowledged, by id."""
        for process in self.clients.values():
            process.kill()
            process.wait()
        self.clients.clear()
        self._kinds = {}
        self.start_missing()
        c = attached(self.folder)
        deadline = time.monotonic() + PATIENCE
        while (kept := c.stats()["queue"]["kept"])["waiting"] + kept["begun"]:
            assert time.monotonic() < deadline, f"unfinished: {kept}"
            time.sleep(0.05)
        left = {job.id: job.result(0).text for job in c.results(timeout=0)}
        c.close()
        return left


def check(folder: Path, left: dict[str, str]) -> dict[str, int]:
    """AssertionError when anything was lost, doubled or changed; counts of what happened."""
    submitted, accepted, acknowledged, got = set(), set(), {}, defaultdict(list)
    for path in folder.glob("*.log"):
        for when, word, id, *text in lines_of(path):
            match word:
                case "submitting":
                    submitted.add(id)
                case "accepted":
                    accepted.add(id)
                case "got":
                    got[id].append((float(when), text[0]))
                case "acknowledged":
                    assert id not in acknowledged, f"{id} was acknowledged twice"
                    acknowledged[id] = float(when)
    expected = _expected()
    for id, readings in got.items():
        assert id in submitted, f"{id} came out of nowhere"
        for when, text in readings:
            assert text == expected(id), f"{id} has another text"
            assert when <= acknowledged.get(id, when), f"{id} was given out after it had been acknowledged"
    for id, text in left.items():
        assert id in submitted and id not in acknowledged, f"{id} is still there"
        assert text == expected(id), f"{id} has another text"
    lost = accepted - got.keys() - left.keys()
    assert not lost, f"lost: {sorted(lost)}"
    again = sum(len(readings) - 1 for readings in got.values())
    return {"accepted": len(accepted), "read": len(got), "read again": again, "left": len(left)}


def _expected():
    """id -> the text of an undisturbed run."""
    spec = importlib.util.spec_from_file_location("makebelieve", HERE.parent / "makebelieve.py")
    makebelieve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(makebelieve)
    from coremill.config.request import SequenceRequest, row_seed

    def expected(id: str) -> str:
        asked = request_of(id)
        sequence = SequenceRequest(id, tuple(asked["prompt_ids"]), asked["max_tokens"], seed=row_seed(0, id, None))
        return makebelieve.expected(sequence)[1]

    return expected


if __name__ == "__main__":
    {"produce": produce, "read": read}[sys.argv[3]](Path(sys.argv[1]), sys.argv[2])
