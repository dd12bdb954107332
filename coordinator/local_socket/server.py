"""The coordinator's end of the local socket: calls come in, handlers answer, now or later."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import msgpack
import zmq

from coremill.config.errors import ConfigError, RequestError
from coremill.coordinator.local_socket.keys import Gate, ServerKeys
from coremill.coordinator.local_socket.records import SOCKET, Kind, Record, write
from coremill.coordinator.local_socket.wire import MAX_FRAME_BYTES, error_fields, packed, unpacked
from coremill.coordinator.transport import PrivateFolder, base_folder, sweep

Handler = Callable[[dict[str, Any]], Any]

# Messages that wait for one client: in ZeroMQ's pipe, and behind it. Whoever leaves more answers unread loses them.
_PIPE_MESSAGES = 1000
_MAX_UNSENT = 100_000
_RETRY_MS, _PROBE_MS = 50, 1000
_PROBE = msgpack.packb((None, "", {}, 0))

log = logging.getLogger("coremill")


class LocalServer:
    """Answers calls on a thread of its own until close().

    Args:
        kind, model: for the record.
        handlers: by kind of call. Each gets the fields and returns the answer (what msgpack can carry) or a Future of
            it; what it raises is raised at the client. Handlers run on the server's thread, so they must be quick.
        listen: also at this tcp:// address, for clients whose keys are listed.
        on_gone: told, on that thread, of each client of watch() that has closed its connection or died.

    Attributes:
        address: for clients of this user. tcp_address: for others, if they may come.
        caller: in a handler, the client that calls, for `send_event` and `watch`.

    Errors: UnsupportedHostError when no folder has a short enough name, ConfigError when `listen` cannot be.
    """

    def __init__(
        self,
        kind: Kind,
        model: str,
        handlers: Mapping[str, Handler],
        on_gone: Callable[[bytes], None] | None = None,
        listen: tuple[str, ServerKeys] | None = None,
    ) -> None:
        self.caller = b""
        self.num_refused = 0  # frames that were no calls
        self._handlers = dict(handlers)
        self._on_gone = on_gone
        self._watched: set[bytes] = set()
        self._owner = os.getpid()
        self._outbox: deque[tuple[bytes, bytes, bool]] = deque()  # client, message, whether it may be dropped
        self._unsent: dict[bytes, deque[bytes]] = {}  # by client whose pipe is full
        self._missed: dict[bytes, int] = {}  # events, by client
        self._lock = threading.Lock()  # whoever has it and finds us open may wake the thread
        self._closing = False
        base = base_folder()
        sweep(base)
        with contextlib.ExitStack() as undo:
            self._folder = PrivateFolder(base)
            undo.callback(self._folder.remove)
            self._context = zmq.Context()
            undo.callback(self._context.term)
            self._socket = self._context.socket(zmq.ROUTER)
            undo.callback(self._socket.close)
            for option, value in _SERVER_OPTIONS:
                self._socket.setsockopt(option, value)
            self.address = f"ipc://{self._folder.path / SOCKET}"
            self._socket.bind(self.address)
            self.tcp_address: str | None = None
            self._gate: Gate | None = None
            if listen is not None:
                self._gate = Gate(self._context, listen[1])
                undo.callback(self._gate.socket.close)
                self.tcp_address = self._listen(*listen)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self._wake)
            self._thread = threading.Thread(target=self._run, name="coremill-socket", daemon=True)
            self._thread.start()
            write(Record(self._owner, kind, model, time.time(), self.address), self._folder.path)
            self._undo = undo.pop_all()

    def _listen(self, address: str, keys: ServerKeys) -> str:
        """Options hold for what is bound from now on."""
        own = ((zmq.CURVE_SECRETKEY, keys.secret), (zmq.IPV6, int("[" in address)))
        for option, value in (*_TCP_OPTIONS, *own):
            self._socket.setsockopt(option, value)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"--listen {address}: {error.strerror or error}") from None
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send_event(self, client: bytes, kind: str, fields: dict[str, Any]) -> None:
        """Tell a client something it did not ask for. From any thread; nothing happens when it is gone."""
        self._post(client, msgpack.packb((None, kind, fields)), True)

    def watch(self, client: bytes) -> None:
        """Tell on_gone within some seconds when this client is gone. For handlers."""
        self._watched.add(client)

    def close(self) -> None:
        """Stop answering and remove the folder. May be repeated."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._undo.close()

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- the thread ----

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        if self._gate is not None:
            poller.register(self._gate.socket, zmq.POLLIN)
        next_probe = 0.0
        while not self._closing:
            ready = dict(poller.poll(_RETRY_MS if self._unsent else _PROBE_MS if self._watched else None))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._gate is not None and self._gate.socket in ready:
                self._gate.answer()
            if self._socket in ready:
                self._receive()
            if self._watched and time.monotonic() >= next_probe:
                next_probe = time.monotonic() + _PROBE_MS / 1000
                self._probe()
            self._send_all()
        # Answers given before close() still go out.
        self._send_all()

    def _probe(self) -> None:
        """An event that clients pass over: sending to one that is gone is noticed."""
        for client in list(self._watched):
            self._send(client, _PROBE)

    def _receive(self) -> None:
        for _ in range(_PIPE_MESSAGES):  # then it is the answers' turn
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._hear(client, frames)

    def _hear(self, client: bytes, frames: list[bytes]) -> None:
        number = None
        try:
            call = unpacked(frames)
            if len(call) == 3 and isinstance(call[0], int):
                number = call[0]
            if number is None or not isinstance(call[1], str) or not isinstance(call[2], dict):
                raise RequestError("invalid_call", "a call is [number, kind, fields]")
            _, kind, fields = call
            handler = self._handlers.get(kind)
            if handler is None:
                known = ", ".join(sorted(self._handlers))
                raise RequestError("unknown_kind", f"unknown kind of call {kind[:60]!r}: there are {known}", "kind")
            self.caller = client
            answer = handler(fields)
        except Exception as error:
            if number is None:
                self.num_refused += 1
            self._answer(client, number, None, error)
            return
        if isinstance(answer, Future):
            answer.add_done_callback(lambda done: self._answer_later(client, number, done))
        else:
            self._answer(client, number, answer, None)

    def _answer_later(self, client: bytes, number: int, done: Future) -> None:
        """On whatever thread has the answer."""
        if done.cancelled():
            self._answer(client, number, None, RequestError("cancelled", "the call was cancelled"))
        else:
            error = done.exception()
            self._answer(client, number, None if error else done.result(), error)

    def _answer(self, client: bytes, number: int | None, value: Any, error: BaseException | None) -> None:
        try:
            data = packed((number, True, value)) if error is None else packed((number, False, error_fields(error)))
        except Exception as problem:  # a value that cannot be carried, or is too large
            data = packed((number, False, error_fields(problem)))
        self._post(client, data, False)

    def _post(self, client: bytes, data: bytes, droppable: bool) -> None:
        self._outbox.append((client, data, droppable))
        if threading.current_thread() is not self._thread:
            with self._lock:
                if not self._closing:
                    os.eventfd_write(self._wake, 1)

    def _send_all(self) -> None:
        for client in list(self._unsent):
            waiting = self._unsent[client]
            while waiting and self._send(client, waiting[0]) is not False:
                waiting.popleft()
            if not waiting:
                del self._unsent[client]
        while self._outbox:
            client, data, droppable = self._outbox.popleft()
            if droppable:
                self._send_event(client, data)
            elif client in self._unsent or self._send(client, data) is False:
                self._keep(client, data)

    def _send(self, client: bytes, data: bytes) -> bool | None:
        """False: its pipe is full. None: it is gone."""
        try:
            self._socket.send_multipart((client, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._missed.pop(client, None)
            if client in self._watched:
                self._watched.remove(client)
                if self._on_gone is not None:
                    self._on_gone(client)
            return None
        return True

    def _send_event(self, client: bytes, data: bytes) -> None:
        missed = self._missed.get(client, 0)
        # The array of three becomes one of four: how many were missed before this one.
        sent = self._send(client, b"\x94" + data[1:] + msgpack.packb(missed)) if client not in self._unsent else False
        if sent:
            self._missed.pop(client, None)
        elif sent is False:
            self._missed[client] = missed + 1

    def _keep(self, client: bytes, data: bytes) -> None:
        waiting = self._unsent.setdefault(client, deque())
        if len(waiting) == _MAX_UNSENT:
            log.warning("a client of the local socket leaves %d answers unread: they are dropped", len(waiting))
            waiting.clear()
        waiting.append(data)


_SERVER_OPTIONS = (
    (zmq.ROUTER_MANDATORY, 1),
    (zmq.SNDHWM, _PIPE_MESSAGES),
    (zmq.RCVHWM, _PIPE_MESSAGES),
    (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),  # whoever sends a larger frame is disconnected
    (zmq.BACKLOG, 4096),
    (zmq.LINGER, 1000),
)
_TCP_OPTIONS = (
    (zmq.CURVE_SERVER, 1),
    (zmq.ZAP_DOMAIN, b"coremill"),
    (zmq.HANDSHAKE_IVL, 10_000),
    # Whoever is silent for so long (in ms), machine or cable, is gone.
    (zmq.HEARTBEAT_IVL, 5000),
    (zmq.HEARTBEAT_TIMEOUT, 20_000),
)
