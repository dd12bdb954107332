"""The worker's end of the wire: settings from the lifeline, messages over one DEALER socket."""

from __future__ import annotations

import os

import zmq

from coremill.config.messages import Message, ProtocolError, Settings, decode, encode

# How long a leaving worker waits for its last words to be heard, in milliseconds.
LINGER_MS = 1000


def read_settings(fd: int) -> Settings | None:
    """Settings from the pipe: 4 bytes of length, little endian, then the message. None when the pipe ends first."""
    head = _read_exactly(fd, 4)
    data = head and _read_exactly(fd, int.from_bytes(head, "little"))
    if not data:
        return None
    settings = decode(data)
    if not isinstance(settings, Settings):
        raise ProtocolError(f"the lifeline must begin with Settings, not {type(settings).__name__}")
    return settings


def _read_exactly(fd: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = os.read(fd, length - len(data))
        if not piece:
            return b""
        data += piece
    return data


class SocketChannel:
    """Messages to and from the coordinator; never drops one. context: whose, when that is not its own."""

    def __init__(self, endpoint: str, identity: bytes, context: zmq.Context | None = None) -> None:
        self._own_context = zmq.Context() if context is None else None
        self.socket = (context or self._own_context).socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, identity)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.connect(endpoint)

    def send(self, message: Message) -> None:
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        self.socket.send(data)

    def receive(self, wait: bool) -> Message | None:
        """The next message; without `wait`, None when there is none yet."""
        try:
            return decode(self.socket.recv(0 if wait else zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        self.socket.close()
        if self._own_context is not None:
            self._own_context.term()
