"""Over the network: listed keys only."""

from __future__ import annotations

import os
import shutil
import socket
import stat

import pytest
import zmq

from coremill.config.errors import ConfigError, EngineClosedError
from coremill.coordinator.local_socket import LocalClient, LocalServer
from coremill.coordinator.local_socket.keys import make_keys, server_keys

WAIT = 60
ANYWHERE = "tcp://127.0.0.1:*"


@pytest.fixture
def keys(tmp_path):
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def server(keys):
    with LocalServer("up", "tiny", {"echo": lambda fields: fields}, listen=(ANYWHERE, server_keys(keys))) as server:
        yield server


def of_client(keys, folder):
    """A client's folder, as it would be on another machine, with keys of its own."""
    make_keys(folder)
    shutil.copy(keys / "server.public", folder / "server.public")
    return folder


def test_keys_are_made_once_and_secret(keys):
    files = {str(path.relative_to(keys)): stat.S_IMODE(path.stat().st_mode) for path in keys.rglob("*")}
    assert files == {
        "server.secret": 0o600, "server.public": files["server.public"], "client.secret": 0o600,
        "clients": 0o700, "clients/client.public": files["clients/client.public"],
    }  # fmt: skip
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match="is not empty"):
        make_keys(keys)


def test_a_listed_client_is_served_beside_those_of_this_user(server, keys):
    with LocalClient(server.tcp_address, keys) as remote, LocalClient(server.address) as local:
        assert remote.call("echo", {"a": 1}, WAIT) == local.call("echo", {"a": 1}, WAIT) == {"a": 1}


def test_an_unlisted_key_is_refused_until_it_is_listed(server, keys, tmp_path):
    other = of_client(keys, tmp_path / "other")
    with LocalClient(server.tcp_address, other) as stranger:
        with pytest.raises(ConfigError, match=r"does not let us in: it has not listed the key of client\.secret"):
            stranger.call("echo", {}, WAIT)
        with pytest.raises(ConfigError, match="does not let us in"):
            stranger.call("echo", {}, WAIT)
    shutil.copy(other / "clients" / "client.public", keys / "clients" / "other.public")
    (keys / "clients" / "torn.public").write_bytes(b"abc")
    with LocalClient(server.tcp_address, other) as known:
        assert known.call("echo", {"a": 1}, WAIT) == {"a": 1}
    (keys / "clients" / "other.public").unlink()
    with LocalClient(server.tcp_address, other) as stranger, pytest.raises(ConfigError, match="does not let us in"):
        stranger.call("echo", {}, WAIT)
    with LocalClient(server.tcp_address, keys) as first:
        assert first.call("echo", {"a": 1}, WAIT) == {"a": 1}


def test_a_coordinator_with_another_key_is_not_spoken_to(server, keys, tmp_path):
    other = of_client(keys, tmp_path / "other")
    shutil.copy(other / "clients" / "client.public", other / "server.public")
    with (
        LocalClient(server.tcp_address, other) as client,
        pytest.raises(EngineClosedError, match=r"is no coordinator, or not the one of the key in server\.public"),
    ):
        client.call("echo", {}, WAIT)


def test_without_keys_nobody_gets_anywhere(server, keys):
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.setsockopt(zmq.LINGER, 0)
    failed = plain.get_monitor_socket(
        zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    )
    plain.connect(server.tcp_address)
    plain.send(b"x")
    assert failed.poll(WAIT * 1000)
    plain.disable_monitor()
    failed.close()
    plain.close()
    context.term()
    host, _, port = server.tcp_address.removeprefix("tcp://").rpartition(":")
    for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(100_000), b"\xff" + b"\0" * 8 + b"\x7f" + b"\3" * 1000):
        with socket.create_connection((host, int(port))) as raw:
            try:
                raw.sendall(junk)
            except ConnectionError:
                pass
    with LocalClient(server.tcp_address, keys) as client:
        assert client.call("echo", {"a": 1}, WAIT) == {"a": 1}
    assert server.num_refused == 0


def test_nobody_there(keys):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        with LocalClient(address, keys) as client, pytest.raises(EngineClosedError, match="nobody listens"):
            client.call("echo", {}, WAIT)
    with (
        LocalServer("up", "tiny", {}, listen=(ANYWHERE, server_keys(keys))) as server,
        pytest.raises(ConfigError, match="--listen tcp://"),
    ):
        LocalServer("up", "tiny", {}, listen=(server.tcp_address, server_keys(keys)))


def test_keys_that_cannot_be(keys, tmp_path):
    with pytest.raises(ConfigError, match=r"server\.secret: No such file.*--make-keys"):
        server_keys(tmp_path)
    (keys / "server.secret").chmod(0o640)
    with pytest.raises(ConfigError, match=r"server\.secret has mode 0640: others can read it"):
        server_keys(keys)
    (keys / "server.secret").chmod(0o600)
    (keys / "server.secret").write_text("short")
    with pytest.raises(ConfigError, match="does not hold a key of 40 characters"):
        server_keys(keys)
    (keys / "client.secret").unlink()
    with pytest.raises(ConfigError, match=r"client\.secret: No such file"):
        LocalClient("tcp://127.0.0.1:1", keys)
    for wrong in ("tcp://", "tcp://host", "tcp://host:99999", "tcp://a b:5", "tcp://h:1;tcp://h:2"):
        with pytest.raises(ConfigError, match="must be tcp://HOST:PORT"):
            LocalClient(wrong, keys)


def test_jobs_over_the_network(resident, attach, keys, tmp_path):
    there = resident(listen=(ANYWHERE, server_keys(keys)))
    c = attach(there.tcp_address, keys=keys)
    job = c.submit(prompt_ids=[5], max_tokens=20, id="a")
    assert "".join(job) == job.result(WAIT).text
    with pytest.raises(ConfigError, match="does not let us in"):
        attach(there.tcp_address, keys=of_client(keys, tmp_path / "other"))
    assert attach(there.address).job("a").result(WAIT) == job.result(WAIT)
