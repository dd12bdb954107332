"""Messages survive the wire, and nothing else gets through."""

from __future__ import annotations

import msgpack
import pytest

from coremill.config.messages import (
    Begin,
    Borrow,
    Cancel,
    Extend,
    Failed,
    Hello,
    Measured,
    ProtocolError,
    Ready,
    Release,
    Released,
    Settings,
    Stats,
    Stepped,
    Stop,
    decode,
    encode,
)

EXAMPLES = [
    Settings(1, "ipc:///x/s", b"1.2", (0, 1), "/x.pack", 5, {"num_blocks": 7}, 6, 16, 128, False),
    Hello(1, 0, 123, (0, 2)),
    Ready("avx2", 1 << 40, 0.25),
    Begin(1, (1, 2, 3), 2, 2, None, (4, 5), (9, 4, 2), 16, 0.5, 0.25, 3, 0.125, 2**64 - 1, (b"\xff", b"stop"), (2,)),
    Extend(1, (6,)),
    Cancel(3),
    Release(4),
    Borrow((3, 2, 5)),
    Stats(5),
    Stop(),
    Stepped(((1, 64),), ((2, 7, b"\xe2\x82"),), ((2, "stop"),), 65, 2, 0.01),
    Released(1, 17),
    Failed(None, "EngineError", "why", "Traceback ..."),
    Measured(1, 2, 3, 4, 5, 6, (("blk.0 qkv", "gemm", 4, 0.5),)),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_there_and_back(message):
    assert decode(encode(message)) == message


def test_every_kind_has_an_example_and_a_number_of_its_own():
    from coremill.config.messages import Message

    assert {type(message) for message in EXAMPLES} == set(Message.__args__)
    assert len({cls.KIND for cls in Message.__args__}) == len(Message.__args__)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (msgpack.packb([99, 1]), "unknown kind of message 99"),
        (msgpack.packb(["Stop"]), "unknown kind of message 'Stop'"),
        (msgpack.packb([Stop.KIND, 1]), "Stop has 1 fields, not 0"),
        (msgpack.packb([Cancel.KIND]), "Cancel has 0 fields, not 1"),
        (msgpack.packb([]), "non-empty array"),
        (msgpack.packb({"kind": 1}), "non-empty array"),
        (b"\xc1", "not msgpack"),
        (b"", "not msgpack"),
        (encode(Stats(1)) + b"\0", "not msgpack"),
    ],
)
def test_anything_else_is_an_error(data, problem):
    with pytest.raises(ProtocolError, match=problem):
        decode(data)
