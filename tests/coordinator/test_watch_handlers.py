"""What any coordinator answers to `coremill top`, over its real socket."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest

from coremill.config.errors import ConfigError, EngineClosedError, RequestError
from coremill.coordinator.local_socket import LocalClient, LocalServer
from coremill.coordinator.view.handlers import watch_handlers
from coremill.coordinator.view.rates import History
from coremill.coordinator.view.screen import whole_lines
from coremill.coordinator.view.table import plain


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited a minute in vain"
        time.sleep(0.005)


def test_a_coordinator_without_a_file_is_seen_and_steered(engine, sim, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.01")
    run = engine(2, max_active=4)
    assert run.wait_ready(60)
    about = {"kind": "up", "model": "tiny\x1b[2J"}
    with LocalServer("up", "tiny", watch_handlers(run, lambda: about)) as server, LocalClient(server.address) as client:
        history = History()
        history.add(client.call("glance"))
        client.call("pause", {"paused": True})
        done: Future = Future()
        run.submit(sim.SequenceRequest("a row", (1, 2, 3), 40), done.set_result)
        wait_for(lambda: client.call("glance")["queue"]["waiting"] == 1)
        client.call("cancel", {"id": "a row"})
        assert done.result(60).error.code == "cancelled"
        client.call("workers", {"count": 1})
        client.call("pause", {"paused": False})
        wait_for(lambda: client.call("glance")["workers"][1]["state"] == "stopped")
        history.add(client.call("glance", {"rows": 3}))
        page = "\n".join(map(plain, whole_lines(history.view(), 100)))
        assert page.startswith("coremill up   tiny[2J\n1 row done   0 waiting   0 running   1 failed")
        assert "stopped" in page and "idle" in page
        for kind, fields, field in (
            ("glance", {"rows": -1}, "rows"), ("glance", {"rows": "x"}, "rows"), ("pause", {"paused": 1}, "paused"),
            ("pause", {}, "paused"), ("workers", {"count": 0}, "count"), ("cancel", {}, "id"),
            ("cancel", {"id": "b"}, "id"),
        ):  # fmt: skip
            with pytest.raises(RequestError) as caught:
                client.call(kind, fields)
            assert caught.value.param == field
        run.close()
        with pytest.raises((EngineClosedError, ConfigError)):
            client.call("glance")
