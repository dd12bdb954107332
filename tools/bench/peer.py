"""`coremill bench peer URL FILE`: the same file through coremill and through another server, in turns.

Each round runs the whole file once through `coremill run` and once through the server, in changing order, so
that whatever else the machine does falls on both. What counts is the ratio of a round; medians are over rounds.
coremill's seconds are those of its --stats (input opened with all workers ready, to the last result written);
the server's are from the first request sent to the last answer. Starting up counts for neither.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from coremill.config.errors import ConfigError, EngineError
from coremill.config.options import of_group
from coremill.config.settings import Settings
from coremill.tools.machine import CpuTimes

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# The longest a server may think about one request, in seconds.
_TIMEOUT = 3600
# Load of others before a run, and steal during one, above which a figure is doubtful.
_MUCH_BUSY, _MUCH_STEAL = 0.05, 0.02


@dataclass(frozen=True, slots=True)
class Run:
    """One engine's run of the whole file. Seconds; `steal` is the share of CPU time lost to the hypervisor."""

    engine: str
    seconds: float
    rows: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    steal: float = 0.0
    first_error: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A row as a server takes it: path below the base URL, JSON body without `model`."""

    path: str
    body: dict[str, Any]


def read_requests(path: Path) -> list[Request]:
    """Rows of an OpenAI batch file, or bare objects with `messages` or `prompt`. ConfigError names the line."""
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            body = row.get("body", row)
            url = row.get("url") or (_CHAT if "messages" in body else _COMPLETIONS)
            # Only rows in OpenAI's shape have a `body`; a bare object's own keys are its fields.
            body = {key: value for key, value in body.items() if key not in ("model", "custom_id", "url", "method")}
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{path}: line {number} is no request: {error}") from None
        requests.append(Request(url, body))
    if not requests:
        raise ConfigError(f"{path}: no requests in it")
    return requests


class Peer:
    """A server that speaks OpenAI's API. `url` may end in /v1 or not; a key is taken from OPENAI_API_KEY."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"URL is {url!r}: it must be http://HOST:PORT")
        self.parts = parts
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.headers = {"Content-Type": "application/json"}
        if os.environ.get("OPENAI_API_KEY"):
            self.headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
        self.model = self._first_model()

    def connect(self) -> HTTPConnection:
        kind = HTTPSConnection if self.parts.scheme == "https" else HTTPConnection
        return kind(self.parts.hostname, self.parts.port, timeout=_TIMEOUT)

    def _first_model(self) -> str:
        """What the server calls its model; "default" when it does not say (llama.cpp takes any name)."""
        connection = self.connect()
        try:
            connection.request("GET", f"{self.prefix}/v1/models", headers=self.headers)
            answer = connection.getresponse()
            content = answer.read()
            return json.loads(content)["data"][0]["id"] if answer.status == 200 else "default"
        except (ValueError, LookupError, TypeError):
            return "default"
        except (OSError, HTTPException) as error:
            raise EngineError(f"{self.parts.geturl()}: no answer: {error}") from None
        finally:
            connection.close()

    def ask(self, connection: HTTPConnection, request: Request) -> tuple[int, int]:
        """(prompt tokens, completion tokens) of one answer. EngineError when there is none."""
        body = json.dumps(request.body | {"model": self.model})
        connection.request("POST", self.prefix + request.path, body, self.headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise EngineError(f"status {answer.status}: {content[:200]!r}")
        usage = json.loads(content)["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"]


def run_peer(peer: Peer, requests: Sequence[Request], concurrency: int) -> Run:
    """Sends every request, `concurrency` at a time."""
    waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
    for request in requests:
        waiting.put(request)
    answers: list[tuple[int, int]] = []
    errors: list[str] = []

    def work() -> None:
        connection = peer.connect()
        while True:
            try:
                request = waiting.get_nowait()
            except queue.Empty:
                break
            try:
                answers.append(peer.ask(connection, request))
            except (OSError, HTTPException, EngineError, ValueError, LookupError, TypeError) as error:
                errors.append(f"{type(error).__name__}: {error}")
                connection.close()  # the next request opens it again
        connection.close()

    threads = [threading.Thread(target=work) for _ in range(min(concurrency, len(requests)))]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    prompt, completion = (sum(column) for column in zip(*answers, strict=True)) if answers else (0, 0)
    return Run("peer", seconds, len(answers), len(errors), prompt, completion, first_error=next(iter(errors), None))


def run_coremill(path: Path, settings: Settings) -> Run:
    """One `coremill run` of the file into a fresh folder. EngineError when it does not finish."""
    with tempfile.TemporaryDirectory(prefix="coremill-bench-") as folder:
        stats_path = Path(folder, "stats.json")
        command = [sys.executable, "-m", "coremill.tools", "run", str(path), "-m", settings.require("model")]
        command += ["-o", str(Path(folder, "out.jsonl")), "--stats", str(stats_path), *_engine_switches(settings)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if not stats_path.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise EngineError(f"coremill run ended with code {done.returncode}: {last}")
        stats = json.loads(stats_path.read_text())
    names = ("seconds", "rows", "errors", "prompt_tokens", "completion_tokens")
    return Run("coremill", *(stats[name] for name in names))


def _engine_switches(settings: Settings) -> list[str]:
    """The engine options given to this command, for the one that is started."""
    switches = []
    for option in of_group("engine"):
        if option.name in settings and settings.given(option.name):
            value = settings[option.name]
            if option.is_flag:
                switches.append(option.switch if value else option.switch.replace("--", "--no-", 1))
            else:
                switches += [option.switch, str(value)]
    return switches


def compare(
    rounds: int, ours: Callable[[], Run], theirs: Callable[[], Run], say: Callable[[str], None]
) -> dict[str, Any]:
    """Runs both `rounds` times in turns, coremill first in odd rounds; {"rounds": ..., "median": ..., "warnings"}."""
    cores = sorted(os.sched_getaffinity(0))
    result: dict[str, Any] = {"rounds": [], "warnings": []}
    for number in range(1, rounds + 1):
        runs = {}
        for engine, call in [("coremill", ours), ("peer", theirs)][:: 1 if number % 2 else -1]:
            runs[engine] = run = _watched(engine, call, cores, number, result["warnings"])
            say(
                f"round {number}: {engine:<8} {run.seconds:8.2f} s  {run.rows} rows, {run.errors} errors,"
                f" prompt {run.prompt_tokens}, completion {run.completion_tokens}"
                f" ({run.completion_tokens / run.seconds:.0f}/s)"
            )
        ratio = runs["peer"].seconds / runs["coremill"].seconds
        say(f"round {number}: coremill is {ratio:.2f} x as fast")
        result["rounds"].append({engine: asdict(run) for engine, run in runs.items()} | {"ratio": ratio})
    medians = {e: median(r[e]["seconds"] for r in result["rounds"]) for e in ("coremill", "peer")}
    result["median"] = medians | {"ratio": median(r["ratio"] for r in result["rounds"])}
    return result


def _watched(engine: str, call: Callable[[], Run], cores: Sequence[int], number: int, warnings: list[str]) -> Run:
    """One run, with what else the machine did at that time."""
    before = CpuTimes.read(cores)
    time.sleep(0.5)
    quiet = CpuTimes.read(cores)
    busy = quiet.busy_since(before)
    if busy > _MUCH_BUSY:
        warnings.append(
            f"round {number}, before {engine}: the cores were {busy:.0%} busy with something else"
            f" (load average {os.getloadavg()[0]:.2f})"
        )
    run = call()
    steal = CpuTimes.read(cores).steal_since(quiet)
    if steal > _MUCH_STEAL:
        warnings.append(f"round {number}, {engine}: the hypervisor took {steal:.1%} of the time")
    if run.errors:
        warnings.append(f"round {number}, {engine}: {run.errors} rows failed ({run.first_error or 'see coremill run'})")
    return Run(**asdict(run) | {"engine": engine, "steal": steal})


def bench_peer(url: str, path: Path, settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole comparison; `say` gets a line for each step."""
    settings.require("model")
    requests = read_requests(path)
    peer = Peer(url)
    concurrency = settings["concurrency"]
    say(f"{path.name}: {len(requests)} requests, {concurrency} at a time; the server's model is '{peer.model}'")
    result = compare(
        settings["rounds"],
        lambda: run_coremill(path, settings),
        lambda: run_peer(peer, requests, concurrency),
        say,
    )
    for warning in result["warnings"]:
        say(f"warning: {warning}")
    medians = result["median"]
    say(
        f"median: coremill {medians['coremill']:.2f} s, peer {medians['peer']:.2f} s;"
        f" coremill is {medians['ratio']:.2f} x as fast"
    )
    return {"file": path.name, "url": url, "concurrency": concurrency, "peer_model": peer.model} | result
