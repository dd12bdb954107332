"""The private socket: calls, events, who is found, and what strangers and deaths do to it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import msgpack
import pytest
import zmq

from coremill.config.errors import ConfigError, EngineClosedError, EngineError, RequestError
from coremill.coordinator.local_socket import LocalClient, LocalServer, running
from coremill.coordinator.local_socket.wire import MAX_FRAME_BYTES
from coremill.coordinator.transport import sweep

WAIT = 60


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def wait_until(condition) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def refuse(fields):
    raise RequestError("no_such_thing", "there is no such thing", "thing")


def misconfigured(fields):
    raise ConfigError("workers is 0")


HANDLERS = {
    "echo": lambda fields: fields,
    "refuse": refuse,
    "config": misconfigured,
    "bug": lambda fields: 1 / 0,
    "unsendable": lambda fields: object(),
    "huge": lambda fields: b"x" * (MAX_FRAME_BYTES + 1),
}


@pytest.fixture
def server():
    with LocalServer("up", "tiny", HANDLERS) as server:
        yield server


@pytest.fixture
def client(server):
    with LocalClient(server.address) as client:
        yield client


def test_calls_are_answered_and_errors_keep_their_kind(client):
    assert client.call("echo", {"a": [1, "b", b"c", None], "n": 1 << 63}, WAIT) == {
        "a": [1, "b", b"c", None],
        "n": 1 << 63,
    }
    with pytest.raises(RequestError, match="no such thing") as caught:
        client.call("refuse", {}, WAIT)
    assert (caught.value.code, caught.value.param) == ("no_such_thing", "thing")
    with pytest.raises(ConfigError, match="workers is 0"):
        client.call("config", {}, WAIT)
    with pytest.raises(RequestError, match=r"unknown kind of call 'echos': there are .*echo") as caught:
        client.call("echos", {}, WAIT)
    assert caught.value.code == "unknown_kind"
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        client.call("bug", {}, WAIT)
    for kind in ("unsendable", "huge"):
        with pytest.raises(RequestError, match="can"):
            client.call(kind, {}, WAIT)
    with pytest.raises(RequestError, match="cannot be sent"):
        client.call("echo", {"a": object()}, WAIT)
    with pytest.raises(RequestError, match=f"at most {MAX_FRAME_BYTES}"):
        client.call("echo", {"a": b"x" * MAX_FRAME_BYTES}, WAIT)
    assert client.call("echo", {}, WAIT) == {}


def test_many_threads_and_large_answers(client):
    wrong = []

    def ask(thread: int) -> None:
        open_calls = {n: client.start("echo", {"n": n, "t": thread, "pad": b"." * 1000}) for n in range(500)}
        for n, answer in open_calls.items():
            said = answer.result(WAIT)
            if (said["n"], said["t"]) != (n, thread):
                wrong.append((thread, n))

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    size = MAX_FRAME_BYTES - 100
    assert len(client.call("echo", {"a": b"x" * size}, WAIT)["a"]) == size


def test_answers_that_come_later_in_any_order():
    later: dict[int, Future] = {}

    def wait(fields):
        return later.setdefault(fields["n"], Future())

    with LocalServer("run", "tiny", {"wait": wait}) as server, LocalClient(server.address) as client:
        calls = [client.start("wait", {"n": n}) for n in range(4)]
        wait_until(lambda: len(later) == 4)
        later[2].set_result("two")
        assert calls[2].result(WAIT) == "two" and not calls[0].done()
        later[0].set_exception(RequestError("late", "too late"))
        with pytest.raises(RequestError, match="too late"):
            calls[0].result(WAIT)
        later[1].cancel()
        later[1].set_running_or_notify_cancel()
        with pytest.raises(RequestError, match="cancelled"):
            calls[1].result(WAIT)
        with pytest.raises(TimeoutError, match="'wait'"):
            client.call("wait", {"n": 3}, 0.05)
        later[3].set_result("three")  # also for the call that nobody waits for any more
        assert calls[3].result(WAIT) == "three"


def test_events_reach_whoever_called_and_a_slow_reader_is_told_what_it_missed():
    asked = []

    def watch(fields):
        asked.append(server.caller)

    with LocalServer("up", "tiny", {"watch": watch}) as server, LocalClient(server.address) as client:
        client.call("watch", {}, WAIT)
        for n in range(3):
            server.send_event(asked[0], "tick", {"n": n})
        events = client.events(WAIT)
        assert [next(events) for _ in range(3)] == [("tick", {"n": n}) for n in range(3)]
        with pytest.raises(TimeoutError):
            next(client.events(0.01))
        server.send_event(b"nobody", "tick", {})

        context = zmq.Context()
        slow = context.socket(zmq.DEALER)
        slow.setsockopt(zmq.RCVHWM, 1)
        slow.setsockopt(zmq.LINGER, 0)
        slow.connect(server.address)
        slow.send(msgpack.packb((1, "watch", {})))
        assert msgpack.unpackb(slow.recv()) == [1, True, None]
        sent, pad = 5000, b"x" * 1000
        for n in range(sent):
            server.send_event(asked[1], "tick", {"n": n, "pad": pad})
        wait_until(lambda: server._missed)
        seen = missed = 0
        while seen + missed < sent:
            if not slow.poll(100):  # all that was kept has been read: the next one says how many were not
                server.send_event(asked[1], "tick", {"n": sent})
                sent += 1
                continue
            _, _, _, count = msgpack.unpackb(slow.recv())
            seen, missed = seen + 1, missed + count
        assert seen + missed == sent and missed > 0
        slow.close()
        context.term()


def test_whoever_listens_is_found_with_what_it_does(server, runtime):
    (record,) = [record for record in running() if record.pid == os.getpid()]
    assert (record.kind, record.model, record.address) == ("up", "tiny", server.address)
    assert abs(record.started - time.time()) < 3600
    (folder,) = runtime.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sweep(runtime) == []
    server.close()
    server.close()
    assert list(runtime.iterdir()) == []
    assert [record for record in running() if record.pid == os.getpid()] == []
    with pytest.raises(EngineClosedError, match="nobody listens"):
        LocalClient(record.address)


def test_only_private_folders_of_ours_are_connected_to(server, runtime, tmp_path):
    for wrong in (None, 5, "tcp://", "tcp://host", "s", "ipc://relative/s", str(tmp_path)):
        with pytest.raises(ConfigError, match="address is"):
            LocalClient(wrong)
    open_folder = tmp_path / "coremill-0123456789abcdef"
    open_folder.mkdir(mode=0o755)
    (open_folder / "s").touch()
    with pytest.raises(ConfigError, match="not a private folder"):
        LocalClient(f"ipc://{open_folder / 's'}")
    os.symlink(Path(server.address.removeprefix("ipc://")).parent, tmp_path / "coremill-fedcba9876543210")
    with pytest.raises(ConfigError, match="not a private folder"):
        LocalClient(f"ipc://{tmp_path / 'coremill-fedcba9876543210' / 's'}")


SERVE = """
import os, sys, time
from concurrent.futures import Future
from coremill.coordinator.local_socket import LocalServer
server = LocalServer("up", "tiny", {"echo": lambda fields: fields, "never": lambda fields: Future()})
child = os.fork() if sys.argv[1] == "fork" else -1
if child != 0:
    print(server.address, child, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_a_killed_one_is_not_found_and_fails_open_calls_at_once(runtime, how):
    process = subprocess.Popen([sys.executable, "-c", SERVE, how], stdout=subprocess.PIPE, text=True)
    address, child = process.stdout.readline().split()
    try:
        assert process.pid in [record.pid for record in running()]
        with LocalClient(address) as client:
            assert client.call("echo", {"a": 1}, WAIT) == {"a": 1}
            waiting = client.start("never")
            process.kill()
            process.wait()
            if how == "alone":
                with pytest.raises(EngineClosedError, match="has ended"):
                    waiting.result(WAIT)
                with pytest.raises(EngineClosedError, match="has ended"):
                    client.call("echo", {}, WAIT)
                with pytest.raises(EngineClosedError, match="has ended"):
                    next(client.events(WAIT))
        assert process.pid not in [record.pid for record in running()]  # also while a forked child has the lock
    finally:
        if how == "fork":
            os.kill(int(child), signal.SIGKILL)
    wait_until(lambda: sweep(runtime) or not list(runtime.iterdir()))
    assert list(runtime.iterdir()) == []
    process.stdout.close()


def test_a_listener_that_is_gone_before_the_first_call(runtime):
    process = subprocess.Popen([sys.executable, "-c", SERVE, "alone"], stdout=subprocess.PIPE, text=True)
    address = process.stdout.readline().split()[0]
    process.kill()
    process.communicate()
    with LocalClient(address) as client, pytest.raises(EngineClosedError, match="has ended"):
        client.call("echo", {}, WAIT)


def test_garbage_and_huge_frames_disturb_nobody(server, client):
    frames = [
        [b""], [b"\xc1"], [b"\x93"], [os.urandom(100)], [msgpack.packb(5)], [msgpack.packb([])], [b"\x91" * 100_000],
        [msgpack.packb(["a", "echo", {}])], [msgpack.packb([1, 5, {}])], [msgpack.packb([1, "echo", [1]])],
        [msgpack.packb([None, "echo", {}])], [b"a", b"b"], [b""] * 1000, [json.dumps([1, "echo", {}]).encode()],
        [msgpack.packb([1, "echo", {}]) * 2],
    ]  # fmt: skip
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(server.address)
    for frame in frames:
        stranger.send_multipart(frame)
    for _ in frames:
        assert stranger.poll(WAIT * 1000)
        number, good, error = msgpack.unpackb(stranger.recv())
        assert not good and error["type"] == "RequestError" and number in (1, None)
    assert client.call("echo", {"a": 1}, WAIT) == {"a": 1}

    disconnected = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.send(b"x" * (MAX_FRAME_BYTES + 1))
    assert disconnected.poll(WAIT * 1000)
    stranger.disable_monitor()
    disconnected.close()
    stranger.close()
    context.term()

    import socket

    for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(server.address.removeprefix("ipc://"))
            raw.sendall(junk)
            assert client.call("echo", {"a": 2}, WAIT) == {"a": 2}


def test_a_client_that_leaves_its_answers_unread_loses_none(server):
    context = zmq.Context()
    lazy = context.socket(zmq.DEALER)
    lazy.setsockopt(zmq.RCVHWM, 1)
    lazy.setsockopt(zmq.SNDHWM, 0)
    lazy.setsockopt(zmq.LINGER, 0)
    lazy.connect(server.address)
    calls, pad = 5000, b"x" * 1000
    for n in range(calls):
        lazy.send(msgpack.packb((n, "echo", {"pad": pad})))
    wait_until(lambda: server._unsent)
    for n in range(calls):
        assert lazy.poll(WAIT * 1000)
        assert msgpack.unpackb(lazy.recv())[0] == n
    wait_until(lambda: not server._unsent)
    lazy.close()
    context.term()


def test_closed_ends(server):
    client = LocalClient(server.address)
    events = threading.Thread(target=lambda: list(client.events(WAIT)))
    events.start()
    client.close()
    client.close()
    events.join(WAIT)
    assert not events.is_alive()
    with pytest.raises(EngineClosedError, match="closed"):
        client.call("echo")
