"""Make-believe workers: `python -m coremill.tools.bench.stubs FIFO STEP_SECONDS RESULT`.

Everything of them is real but the model and the process: many share one hub, this program. Each has its own socket,
speaks the whole protocol through the worker's own loop, and takes STEP_SECONDS for a step that computes nothing.

The coordinator starts a process for each worker all the same, `placeholder_command`, which copies what comes through
its lifeline, the settings, into the hub's FIFO and waits for the lifeline's end. When the last of them and the
bench have closed the FIFO, the hub writes what was counted to RESULT and leaves.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import zmq

from coremill.config.messages import PROTOCOL_VERSION, Hello, Ready, Settings, Stop, decode
from coremill.config.smaps import Memory
from coremill.worker.batch import StepOutput
from coremill.worker.channel import SocketChannel
from coremill.worker.loop import WorkerLoop

# Never one that ends a text: the bench's engine has none.
_TOKEN = 5
_OUTPUT = StepOutput(_TOKEN, "ok")
_TOKEN_BYTES = [b"word "] * (_TOKEN + 1)


def placeholder_command(fifos: str, num_hubs: int) -> tuple[str, ...]:
    """Stands for `python -m coremill.worker`; the lifeline's number is appended. fifos: path without a hub's number."""
    script = f'exec cat "/proc/self/fd/$1" > "$0$(( $$ % {num_hubs} ))"'
    return ("/bin/sh", "-c", script, fifos)


class StubModel:
    """Chooses a token for each sequence that wants one."""

    def __init__(self) -> None:
        self.num_samples = 0

    def new_batch(self) -> StubModel:
        return self

    def clear(self) -> None:
        self.num_samples = 0

    def add(self, tokens: Any, position: int, blocks: Any, sample: Any) -> None:
        self.num_samples += sample is not None

    def step(self, batch: StubModel) -> list[StepOutput]:
        return [_OUTPUT] * batch.num_samples

    def copy_block(self, source: int, target: int, num_tokens: int) -> None:
        pass

    def borrow(self, cores: Any) -> None:
        pass

    def profile(self) -> list[Any]:
        return []


class StubChannel(SocketChannel):
    """One worker's socket in a context that many share; counts what is sent."""

    def __init__(self, context: zmq.Context, settings: Settings, counts: Counter[str]) -> None:
        super().__init__(settings.endpoint, settings.identity, context)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._counts = counts

    def send_bytes(self, data: bytes) -> None:
        self._counts["messages"] += 1
        self._counts["bytes"] += len(data)
        super().send_bytes(data)


class Stub:
    """One worker. due: when its next step may be over."""

    def __init__(self, context: zmq.Context, settings: Settings, counts: Counter[str]) -> None:
        self.channel = StubChannel(context, settings, counts)
        self.due = 0.0
        self._loop = WorkerLoop(
            self.channel,
            StubModel(),
            _TOKEN_BYTES,
            step_tokens=settings.step_tokens,
            counters=counts,
            measure=lambda: Memory(0, 0, 0, 0, 0),
        )
        self.channel.send(Hello(PROTOCOL_VERSION, settings.worker, os.getpid(), settings.cores))
        self.channel.send(Ready("stub", 0, 0.0))

    def hear(self) -> bool:
        """All that has come; False when it was Stop."""
        while (message := self.channel.receive(wait=False)) is not None:
            if isinstance(message, Stop):
                return False
            self._loop.hear(message)
        return True

    def step(self, now: float, step_seconds: float) -> bool:
        """If something can run and the step before is over; whether something can."""
        plan = self._loop.plan()
        if plan and now >= self.due:
            self._loop.step(plan)
            self.due = now + step_seconds
        return bool(plan)


class Hub:
    """Stubs that take their turns in one thread."""

    def __init__(self, fifo: Path, step_seconds: float) -> None:
        self.counts: Counter[str] = Counter()
        self._step_seconds = step_seconds
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._stubs: dict[zmq.Socket, Stub] = {}
        self._busy: dict[zmq.Socket, Stub] = {}  # those that can take a step
        self._fifo = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        self._settings = b""

    def run(self) -> None:
        """Until the FIFO ends, which it must not do before somebody has it open."""
        self._poller.register(self._fifo, zmq.POLLIN)
        while True:
            events = dict(self._poller.poll(self._timeout()))
            if self._fifo in events and not self._read_fifo():
                return
            for socket in events:
                if (stub := self._stubs.get(socket)) is not None:
                    if stub.hear():
                        self._busy[socket] = stub
                    else:
                        self._leave(socket)
            now = time.monotonic()
            for socket, stub in list(self._busy.items()):
                if not stub.step(now, self._step_seconds):
                    del self._busy[socket]

    def _timeout(self) -> float | None:
        """Milliseconds until a step is over; None when nobody has any."""
        if not self._busy:
            return None
        return max(0.0, 1e3 * (min(stub.due for stub in self._busy.values()) - time.monotonic()))

    def _read_fifo(self) -> bool:
        data = os.read(self._fifo, 1 << 16)
        self._settings += data
        # Each as the lifeline has it: 4 bytes of length, the message. One write, so they never mix.
        while len(self._settings) >= 4 + (length := int.from_bytes(self._settings[:4], "little")) > 4:
            stub = Stub(self._context, decode(self._settings[4 : 4 + length]), self.counts)
            self._settings = self._settings[4 + length :]
            self._stubs[stub.channel.socket] = stub
            self._poller.register(stub.channel.socket, zmq.POLLIN)
        return bool(data)

    def _leave(self, socket: zmq.Socket) -> None:
        self._poller.unregister(socket)
        self._busy.pop(socket, None)
        del self._stubs[socket]
        socket.close()


def main(fifo: str, step_seconds: str, result: str) -> None:
    hub = Hub(Path(fifo), float(step_seconds))
    print("ready", flush=True)
    hub.run()
    Path(result).write_text(json.dumps(hub.counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
