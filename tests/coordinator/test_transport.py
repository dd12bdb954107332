"""The private folder of the socket, and messages through it."""

from __future__ import annotations

import os
import stat
import time

import pytest
import zmq

from coremill.config.errors import UnsupportedHostError
from coremill.config.messages import Cancel, ProtocolError, Stats, encode
from coremill.coordinator.transport import MAX_SOCKET_PATH, PrivateFolder, Transport, base_folder, sweep


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def transport(runtime):
    made = Transport()
    yield made
    made.close()


class Peer:
    def __init__(self, endpoint: str, identity: bytes) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, identity)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def receive(transport):
    deadline = time.monotonic() + 60
    while (received := transport.receive()) is None:
        assert time.monotonic() < deadline
        transport.socket.poll(100)
    return received


def test_connections_outlive_the_door(transport, runtime):
    first = Peer(transport.open_door(), b"0.1")
    first.socket.send(encode(Cancel(1)))
    assert receive(transport) == (b"0.1", Cancel(1))
    (folder,) = runtime.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    transport.close_door()
    assert list(runtime.iterdir()) == []
    second = Peer(transport.open_door(), b"1.1")
    second.socket.send(encode(Stats(2)))
    assert receive(transport) == (b"1.1", Stats(2))
    transport.close_door()
    for peer, identity in ((first, b"0.1"), (second, b"1.1")):
        assert transport.send(identity, Cancel(7))
        assert peer.socket.recv() == encode(Cancel(7))
    first.close()
    second.close()


def test_a_door_nobody_uses_any_more_is_taken_down(transport):
    endpoints = [transport.open_door()]
    transport.close_door()
    endpoints.append(transport.open_door())
    transport.leave(endpoints[0])
    transport.leave(endpoints[1])
    assert transport.open_door() == endpoints[1]  # still open, so it can be used again
    transport.close_door()
    transport.leave(endpoints[1])
    assert transport._users == {}


def test_sending_to_nobody_is_noticed(transport):
    transport.open_door()
    assert transport.send(b"nobody", Cancel(1)) is False


def test_bytes_that_are_no_message_stop_the_engine(transport):
    peer = Peer(transport.open_door(), b"0.1")
    peer.socket.send(b"\xc1")
    with pytest.raises(ProtocolError):
        receive(transport)
    peer.close()


def test_only_what_nobody_holds_is_swept(tmp_path):
    held = PrivateFolder(tmp_path)
    (tmp_path / "coremill-0000000000000000").mkdir(mode=0o700)
    (tmp_path / "coremill-0000000000000000" / "s").touch()
    (tmp_path / "coremill-1111111111111111").mkdir(mode=0o755)  # not made by us
    (tmp_path / "coremill-and-more").mkdir(mode=0o700)
    os.symlink(tmp_path / "coremill-and-more", tmp_path / "coremill-2222222222222222")
    assert [path.name for path in sweep(tmp_path)] == ["coremill-0000000000000000"]
    assert held.path.exists()
    held.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "coremill-1111111111111111",
        "coremill-2222222222222222",
        "coremill-and-more",
    ]


def test_a_runtime_folder_that_cannot_be_used_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/tmp")
    for useless in ("relative/path", str(tmp_path / "missing"), "/" + "x" * 200, ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", useless)
        assert str(base_folder()) == "/tmp"


def test_a_temporary_folder_with_too_long_a_name(tmp_path, monkeypatch):
    long = tmp_path / ("x" * MAX_SOCKET_PATH)
    long.mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(long))
    with pytest.raises(UnsupportedHostError, match=f"{MAX_SOCKET_PATH} bytes"):
        base_folder()


def test_the_longest_allowed_name_works(tmp_path, monkeypatch):
    room = MAX_SOCKET_PATH - len(os.fsencode(tmp_path)) - len("/coremill-0123456789abcdef/s") - 1
    if room < 1:
        pytest.fail(f"the tests' own folder is too long already: {tmp_path}")
    folder = tmp_path / ("x" * room)
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert base_folder() == folder
    made = Transport()
    peer = Peer(made.open_door(), b"0.1")
    peer.socket.send(encode(Cancel(1)))
    assert receive(made)
    peer.close()
    made.close()
