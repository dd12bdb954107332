"""Peers that are servers: any that speaks OpenAI's API, and llama.cpp's, started afresh for each round."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from coremill.config.errors import ConfigError, EngineError
from coremill.tools.bench.rounds import Run, how_it_ended
from coremill.tools.bench.rows import numbered_lines

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# The longest a server may think about one request, and about starting, in seconds.
_TIMEOUT, _START_TIMEOUT = 3600, 600
# Tokens that llama.cpp's server keeps for each request it works on.
_LLAMA_SLOT_TOKENS = 3584


@dataclass(frozen=True, slots=True)
class Request:
    """A row as a server takes it: path below the base URL, JSON body without `model`."""

    path: str
    body: dict[str, Any]


def read_requests(path: Path) -> list[Request]:
    """Rows of an OpenAI batch file, or bare objects with `messages` or `prompt`. ConfigError names the line."""
    requests = []
    for number, line in numbered_lines(path):
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


class Server:
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


def run_server(server: Server, requests: Sequence[Request], concurrency: int) -> Run:
    """Sends every request, `concurrency` at a time."""
    waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
    for request in requests:
        waiting.put(request)
    answers: list[tuple[int, int]] = []
    errors: list[str] = []

    def work() -> None:
        connection = server.connect()
        while True:
            try:
                request = waiting.get_nowait()
            except queue.Empty:
                break
            try:
                answers.append(server.ask(connection, request))
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


# ---- llama.cpp ----


def run_llama(program: str, model: Path, threads: int, requests: Sequence[Request], concurrency: int) -> Run:
    """A fresh `llama-server` over the file: one that has run before would answer from its memory of prompts.

    Its best settings for batches: a slot for each open request, each with a KV cache of its own.
    """
    port = _free_port()
    command = [program, "-m", str(model), "-t", str(threads), "-np", str(concurrency)]
    command += ["-c", str(concurrency * _LLAMA_SLOT_TOKENS), "--no-kv-unified", "--host", "127.0.0.1"]
    begin = time.perf_counter()
    with _running([*command, "--port", str(port)]) as process:
        _wait_until_healthy(process, port)
        ready = time.perf_counter() - begin
        run = run_server(Server(f"http://127.0.0.1:{port}"), requests, concurrency)
    return replace(run, ready_seconds=ready)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _running(command: Sequence[str]) -> Iterator[_Process]:
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        except OSError as error:
            raise EngineError(f"{command[0]}: {error.strerror}") from None
        try:
            yield _Process(process, said)
        finally:
            process.kill()
            process.wait()


class _Process:
    """A server's process and what it says."""

    def __init__(self, process: subprocess.Popen, said: Any) -> None:
        self._process, self._said = process, said

    def check(self) -> None:
        """EngineError with its last line when it has ended."""
        if self._process.poll() is None:
            return
        self._said.seek(0)
        how = how_it_ended(self._process.returncode, self._said.read())
        raise EngineError(f"{self._process.args[0]} {how}")


def _wait_until_healthy(process: _Process, port: int) -> None:
    """llama.cpp listens at once and answers /health with 503 until the model is loaded."""
    deadline = time.monotonic() + _START_TIMEOUT
    while time.monotonic() < deadline:
        process.check()
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except (OSError, HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.02)
    raise EngineError(f"the server was not ready after {_START_TIMEOUT} s")
