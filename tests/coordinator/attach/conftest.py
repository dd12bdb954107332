"""Resident coordinators with make-believe models, in this process and in others."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOST = Path(__file__).parent.parent / "queue" / "host.py"


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory, monkeypatch) -> Path:
    folder = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture
def resident(tiny_pack, monkeypatch):
    """start(ctx=400, **options) -> a Resident of this process, with one worker."""
    from coremill.config.engine import EngineConfig
    from coremill.coordinator.attach.resident import Resident
    from coremill.coordinator.python import local

    spec = importlib.util.spec_from_file_location("host", HOST)
    host = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(host)
    original = local._new_engine
    made = []

    def start(queue=None, keep=None, listen=None, **options) -> Resident:
        host.use_fake_workers()
        try:
            config = EngineConfig(**{"ctx": 400, "workers": 1, **options})
            made.append(Resident(str(tiny_pack), config, queue=queue, keep=keep, listen=listen))
        finally:
            local._new_engine = original
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def attach():
    """attach(address=None, **options) -> a Coordinator, detached after the test."""
    from coremill.coordinator import Coordinator

    made = []

    def start(address=None, **options) -> Coordinator:
        made.append(Coordinator.attach(address, **options))
        return made[-1]

    yield start
    for each in made:
        each.close()


class Host:
    """A resident coordinator in a process of its own."""

    def __init__(self, pack: Path, queue: Path | str = "", **environment: str) -> None:
        command = [sys.executable, str(HOST), str(pack), str(queue), "serve"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}, start_new_session=True
        )
        self.address, self.workers = "", []
        for line in self.process.stdout:
            kind, *rest = line.split()
            if kind == "worker":
                self.workers.append(int(rest[0]))
            elif kind == "ready":
                self.address = rest[0]
                break

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def host(tiny_pack):
    """start(queue="", **environment) -> a Host, killed after the test."""
    made = []

    def start(queue="", **environment) -> Host:
        made.append(Host(tiny_pack, queue, **environment))
        assert made[-1].address, "it did not start"
        return made[-1]

    yield start
    for each in made:
        each.kill()


@pytest.fixture
def client():
    """run(script, *arguments) -> a Python process, killed after the test; its standard output is a text pipe."""
    made = []

    def run(script: str, *arguments: object) -> subprocess.Popen:
        command = [sys.executable, "-c", script, *map(str, arguments)]
        made.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return made[-1]

    yield run
    for process in made:
        process.kill()
        process.communicate()
