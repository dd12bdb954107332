"""The other end of the local socket: calls from any thread, one thread that sends and hears."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from coremill.config.errors import ConfigError, CoremillError, EngineClosedError, EngineError
from coremill.coordinator.local_socket.keys import check_tcp, client_keys
from coremill.coordinator.local_socket.records import check_address
from coremill.coordinator.local_socket.wire import error_of, packed, unpacked

_MAX_EVENTS = 10_000


class LocalClient:
    """Asks a running coordinator.

        with LocalClient(running()[0].address) as client:
            print(client.call("stats"))

    address: as a Record has it, or tcp://HOST:PORT with the folder of keys for it. ConfigError when that cannot be, or
    belongs to another user, EngineClosedError when nobody is there. Calls that are open when the coordinator ends raise
    EngineClosedError; what it had taken by then it may have done.
    """

    def __init__(self, address: str, keys: str | os.PathLike[str] | None = None) -> None:
        options = _CLIENT_OPTIONS + _options_for(address, keys)
        self.address = address
        self._owner = os.getpid()
        self._numbers = itertools.count(1)
        self._lock = threading.Condition(threading.RLock())
        self._calls: dict[int, Future] = {}  # by number, until answered
        self._outbox: deque[bytes] = deque()
        self._events: deque[tuple[str, dict[str, Any]]] = deque()
        self._num_missed = 0
        self._ended: CoremillError | None = None
        self._met = False  # it has answered as a coordinator does
        with contextlib.ExitStack() as undo:
            self._context = zmq.Context()
            undo.callback(self._context.term)
            self._socket = self._context.socket(zmq.DEALER)
            undo.callback(self._socket.close)
            for option, value in options:
                self._socket.setsockopt(option, value)
            self._monitor = self._socket.get_monitor_socket(_WATCHED)
            undo.callback(self._monitor.close)
            undo.callback(self._socket.disable_monitor)
            self._socket.connect(address)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self._wake)
            self._thread = threading.Thread(target=self._run, name="coremill-client", daemon=True)
            self._thread.start()
            self._undo = undo.pop_all()

    # ---- for everybody ----

    def call(self, kind: str, fields: Mapping[str, Any] | None = None, timeout: float | None = 30.0) -> Any:
        """The answer to one call, or what its handler raised. TimeoutError after `timeout` seconds without one."""
        answer = self.start(kind, fields)
        try:
            return answer.result(timeout)
        except TimeoutError:
            if not answer.cancel():  # it has come, perhaps just now
                return answer.result()
            raise TimeoutError(f"no answer to {kind!r} from {self.address} within {timeout:g} s") from None

    def start(self, kind: str, fields: Mapping[str, Any] | None = None) -> Future:
        """The same without waiting."""
        if os.getpid() != self._owner:
            raise EngineError(f"this client belongs to process {self._owner}: make a new one after a fork")
        answer: Future = Future()
        number = next(self._numbers)
        data = packed((number, kind, dict(fields or {})))
        with self._lock:
            if self._ended is not None:
                raise _again(self._ended)
            self._calls[number] = answer
            self._outbox.append(data)
            os.eventfd_write(self._wake, 1)
        answer.add_done_callback(lambda done: self._take(number))
        return answer

    def events(self, timeout: float | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """What the coordinator tells without being asked, (kind, fields) each, from now until close().

        Between them ("missed", {"count": n}) where the reader was too slow for n of them. Raises EngineClosedError when
        the coordinator ends, TimeoutError after `timeout` seconds without any.
        """
        while True:
            with self._lock:
                there = self._lock.wait_for(lambda: self._events or self._num_missed or self._ended, timeout)
                if not there:
                    raise TimeoutError(f"no event from {self.address} within {timeout:g} s")
                if self._num_missed:
                    event = ("missed", {"count": self._num_missed})
                    self._num_missed = 0
                elif self._events:
                    event = self._events.popleft()
                elif self._ended is None or self._thread_closed:
                    return
                else:
                    raise _again(self._ended)
            yield event

    def close(self) -> None:
        """Leave. Open calls raise EngineClosedError. May be repeated."""
        if os.getpid() != self._owner:
            return
        self._end(EngineClosedError("this client has been closed"), closed=True)
        with self._lock:
            undo, self._undo = self._undo, contextlib.ExitStack()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            undo.close()

    def __enter__(self) -> LocalClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- the thread ----

    _thread_closed = False

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while self._ended is None:
            poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._outbox else 0))
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            self._receive()
            if self._monitor in ready:
                self._watch()
            self._send()

    def _send(self) -> None:
        while self._outbox:
            try:
                self._socket.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:  # not connected yet, or the coordinator is busy
                return
            self._outbox.popleft()

    def _receive(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._hear(unpacked(frames))
            except CoremillError as error:
                self._end(EngineError(f"{self.address} does not speak as a coordinator does: {error}"))

    def _hear(self, message: list[Any]) -> None:
        number, said, value, *missed = message
        if number is None and said == "":  # the coordinator wants to know whether we are there
            return
        if number is None and isinstance(said, str):
            with self._lock:
                self._num_missed += sum(missed)
                if len(self._events) == _MAX_EVENTS:
                    self._events.popleft()
                    self._num_missed += 1
                self._events.append((said, value))
                self._lock.notify_all()
            return
        answer = self._take(number)
        if answer is not None and answer.set_running_or_notify_cancel():
            if said is True:
                answer.set_result(value)
            else:
                answer.set_exception(error_of(value))

    def _watch(self) -> None:
        """What happens to the connection."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._met = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._end(ConfigError(f"{self.address} does not let us in: it has not listed the key of client.secret"))
            elif event == zmq.EVENT_DISCONNECTED and self._met:
                self._receive()  # what it has said before
                self._end(EngineClosedError(f"the coordinator at {self.address} has ended"))
            elif event == zmq.EVENT_DISCONNECTED or event in _HANDSHAKE_FAILED:
                self._end(EngineClosedError(f"{self.address} is no coordinator{_OR_KEY if self._is_tcp else ''}"))
            elif event == zmq.EVENT_CONNECT_RETRIED and self._nobody_listens():
                self._end(EngineClosedError(f"nobody listens at {self.address}: the coordinator has ended"))

    @property
    def _is_tcp(self) -> bool:
        return self.address.startswith("tcp:")

    def _nobody_listens(self) -> bool:
        """A connection may fail for other reasons: too many at once, say."""
        if self._is_tcp:
            return True
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(self.address.removeprefix("ipc://"))
            except (ConnectionRefusedError, FileNotFoundError):
                return True
            except OSError:
                pass
        return False

    def _end(self, reason: CoremillError, closed: bool = False) -> None:
        with self._lock:
            self._thread_closed |= closed
            if self._ended is not None:
                return
            self._ended = reason
            calls = [self._calls.pop(number) for number in list(self._calls)]
            self._lock.notify_all()
            os.eventfd_write(self._wake, 1)
        for answer in calls:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(_again(reason))

    def _take(self, number: int) -> Future | None:
        """Whoever takes a call tells the one who waits for it."""
        with self._lock:
            return self._calls.pop(number, None)


def _again(error: CoremillError) -> CoremillError:
    """An exception collects the traceback of each raise, so everybody gets one of their own."""
    return type(error)(str(error))


_CLIENT_OPTIONS = (
    (zmq.IMMEDIATE, 1),  # nothing is queued for a coordinator that is not there
    (zmq.SNDHWM, 1000),
    (zmq.RCVHWM, 1000),
    (zmq.LINGER, 0),
)
_HANDSHAKE_FAILED = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_WATCHED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_OR_KEY = ", or not the one of the key in server.public"


def _options_for(address: str, keys: str | os.PathLike[str] | None) -> tuple[tuple[int, Any], ...]:
    if not (isinstance(address, str) and address.startswith("tcp:")):
        if keys is not None:
            raise ConfigError(f"keys are for tcp:// addresses, not for {address!r}")
        check_address(address)
        return ()
    check_tcp(address, "address")
    if keys is None:
        raise ConfigError(f"address {address} needs keys: the folder with client.secret and server.public")
    ours = client_keys(keys)
    return (
        (zmq.IPV6, int("[" in address)),
        (zmq.CURVE_SERVERKEY, ours.server),
        (zmq.CURVE_PUBLICKEY, ours.public),
        (zmq.CURVE_SECRETKEY, ours.secret),
        (zmq.HEARTBEAT_IVL, 5000),
        (zmq.HEARTBEAT_TIMEOUT, 20_000),
    )
