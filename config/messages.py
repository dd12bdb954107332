"""Everything the coordinator and a worker say to each other: typed, versioned, small.

    coordinator -> worker   Settings (once, through the lifeline pipe), then over the socket
                            Begin, Extend, Cancel, Release, Borrow, Stats, Stop
    worker -> coordinator   Hello, Ready, Stepped, Released, Failed, Measured

A message is one msgpack array: [kind, field, field, ...]. A sequence is sent whole once (Begin), then as
differences (Extend). Messages carry token ids and block ids, never tensors.

A *lease* is one stay of a sequence with one worker. Every Begin has a new lease number, so what a worker says
about an earlier stay (late, after a crash, after a move) can be told apart and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar

import msgpack

from coremill.config.errors import EngineError

PROTOCOL_VERSION = 3


class ProtocolError(EngineError):
    """Bytes that are not a message of this protocol version."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All a worker must know before its first message. Descriptors are inherited ones of these numbers.

    endpoint: ZeroMQ address; identity: the worker's routing id there; cores: CPUs it has been pinned to;
    pack: path of the pack file; arena: fields of ArenaGeometry; counters_fd: this worker's CounterPage;
    step_tokens: rows of a step, which is also the longest prefill chunk.
    """

    KIND: ClassVar[int] = 1
    worker: int
    endpoint: str
    identity: bytes
    cores: tuple[int, ...]
    pack: str
    arena_fd: int
    arena: dict[str, Any]
    counters_fd: int
    max_active: int
    step_tokens: int
    profile: bool


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a worker, before it loads anything. affinity: the CPUs the kernel says it may use."""

    KIND: ClassVar[int] = 2
    version: int
    worker: int
    pid: int
    affinity: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is mapped and a step can run. scratch_bytes: what the worker allocated for it."""

    KIND: ClassVar[int] = 3
    isa: str
    scratch_bytes: int
    load_seconds: float


@dataclass(frozen=True, slots=True)
class Begin:
    """A sequence, whole. tokens: prompt, then whatever was generated in earlier leases.

    The first `computed` tokens are already in the arena. blocks: the block table from position 0.
    copy: (source, target, tokens): the last of those `computed` tokens are the first of block `source`, and must be
    copied into block `target` of the table before the first step.
    max_tokens counts all generated tokens, those of earlier leases included. stop: byte strings that end the text,
    stop_ids: tokens that end it.
    alone_until: it may have crashed a worker, so no other sequence shares its steps until more than this many
    of its tokens are computed; None when nothing is held against it.
    """

    KIND: ClassVar[int] = 4
    lease: int
    tokens: tuple[int, ...]
    num_prompt: int
    computed: int
    alone_until: int | None
    blocks: tuple[int, ...]
    copy: tuple[int, int, int] | None
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: tuple[bytes, ...]
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Extend:
    """Blocks to append to the table of a lease."""

    KIND: ClassVar[int] = 5
    lease: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Forget a lease; answered by Released unless the sequence has finished meanwhile."""

    KIND: ClassVar[int] = 6
    lease: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give a lease back at the next step boundary; answered as Cancel is."""

    KIND: ClassVar[int] = 7
    lease: int


@dataclass(frozen=True, slots=True)
class Borrow:
    """The cores of others that threads of the worker may use, nearest first, until the next such message; () ends that
    at the next step boundary. The worker uses as many of them as make its steps faster."""

    KIND: ClassVar[int] = 14
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stats:
    """Measure your own memory and answer with Measured."""

    KIND: ClassVar[int] = 8
    request: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave now."""

    KIND: ClassVar[int] = 9


@dataclass(frozen=True, slots=True)
class Stepped:
    """What one step did.

    prefilled: (lease, tokens now in the arena) of each sequence that read a chunk without choosing a token.
    tokens: (lease, token, text) of each sequence that chose one; text: bytes now certain to be shown.
    finished: (lease, "stop" | "length") of each sequence that needs no more steps; the worker has forgotten it.
    rows, sequences: size of the step; seconds: its duration.
    """

    KIND: ClassVar[int] = 10
    prefilled: tuple[tuple[int, int], ...]
    tokens: tuple[tuple[int, int, bytes], ...]
    finished: tuple[tuple[int, str], ...]
    rows: int
    sequences: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Released:
    """The worker will not touch the lease's blocks again; its first `computed` tokens are in them."""

    KIND: ClassVar[int] = 11
    lease: int
    computed: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A lease failed (code, message), or with lease None the worker as a whole; traceback for people."""

    KIND: ClassVar[int] = 12
    lease: int | None
    code: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Memory of the worker in bytes. pss is split by what is mapped: pack, arena, everything else.

    profile: (label, kind, calls, seconds) of each operation of a step; empty unless asked for in Settings.
    """

    KIND: ClassVar[int] = 13
    request: int
    rss: int
    pss: int
    weights: int
    arena: int
    private: int
    profile: tuple[tuple[str, str, int, float], ...]


Message = (
    Settings | Hello | Ready | Begin | Extend | Cancel | Release | Borrow | Stats | Stop
    | Stepped | Released | Failed | Measured
)  # fmt: skip

_BY_KIND: dict[int, type] = {cls.KIND: cls for cls in Message.__args__}
_NUM_FIELDS: dict[int, int] = {kind: len(fields(cls)) for kind, cls in _BY_KIND.items()}


def _reader(cls: type):
    names = [field.name for field in fields(cls)]
    if len(names) > 1:
        return attrgetter(*names)
    return (lambda message: (getattr(message, names[0]),)) if names else (lambda message: ())


_READERS: dict[int, Any] = {kind: _reader(cls) for kind, cls in _BY_KIND.items()}


def encode(message: Message) -> bytes:
    """One message as bytes."""
    return msgpack.packb((message.KIND, *_READERS[message.KIND](message)))


def decode(data: bytes) -> Message:
    """The message in `data`; ProtocolError when its kind is unknown or its fields do not fit."""
    try:
        parts = msgpack.unpackb(data, use_list=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{len(data)} bytes that are not msgpack: {error}") from error
    if not isinstance(parts, tuple) or not parts:
        raise ProtocolError(f"a message must be a non-empty array, not {type(parts).__name__}")
    kind, values = parts[0], parts[1:]
    cls = _BY_KIND.get(kind) if isinstance(kind, int) else None
    if cls is None:
        raise ProtocolError(f"unknown kind of message {kind!r}")
    if len(values) != _NUM_FIELDS[kind]:
        raise ProtocolError(f"{cls.__name__} has {len(values)} fields, not {_NUM_FIELDS[kind]}")
    return cls(*values)
