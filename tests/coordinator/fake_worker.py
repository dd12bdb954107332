"""A worker process with a make-believe model: everything else of it is real.

Keeps tokens in the real arena, where a model keeps keys and values. FAKE_* environment variables make it slow or
ill: FAKE_STEP_SECONDS, FAKE_DIE_AT_START (signal), FAKE_LOAD_ERROR, FAKE_RAISE or FAKE_HANG (on POISON),
FAKE_AFFINITY, FAKE_PROTOCOL, FAKE_HOLD_STEP (this one lasts until the coordinator has said something), FAKE_HOLD_FILE
(no step ends while it exists).
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from makebelieve import POISON, TOKEN_BYTES, FakeBatch, next_token

from coremill.config import messages
from coremill.config.arena import ArenaGeometry
from coremill.config.errors import ModelError
from coremill.worker import channel
from coremill.worker.__main__ import main
from coremill.worker.batch import StepOutput
from coremill.worker.channel import SocketChannel

SOCKETS = []


class Channel(SocketChannel):
    def __init__(self, *args):
        super().__init__(*args)
        SOCKETS.append(self.socket)


class FakeModel:
    scratch_bytes = 0

    def __init__(self, arena: memoryview, block_bytes: int, counters) -> None:
        self.arena, self.block_bytes, self.counters = arena, block_bytes, counters
        self.seconds = float(os.environ.get("FAKE_STEP_SECONDS", "0"))

    def new_batch(self):
        return FakeBatch()

    def profile(self):
        return [("all", "fake", self.counters["steps"], 0.0)]

    def borrow(self, cores):
        pass

    def step(self, batch):
        time.sleep(self.seconds)
        if self.counters["steps"] + 1 == int(os.environ.get("FAKE_HOLD_STEP", "0")):
            self.counters["operations"] += 1  # what tests wait for
            SOCKETS[0].poll()
        while os.path.exists(os.environ.get("FAKE_HOLD_FILE", "")):
            time.sleep(0.001)
        outputs = []
        for tokens, position, blocks, sample in batch:
            if POISON in tokens:
                if "FAKE_HANG" in os.environ:
                    time.sleep(1000)
                if "FAKE_RAISE" in os.environ:
                    raise RuntimeError("this row is poison")
                os.kill(os.getpid(), signal.SIGSEGV)
            for at, token in enumerate(tokens, position):
                self._cell(blocks, at)[0] = token
            if sample is not None:
                seen = [self._cell(blocks, at)[0] for at in range(position + len(tokens))]
                outputs.append(StepOutput(next_token(seen, sample.seed), "ok"))
        return outputs

    def copy_block(self, source, target, num_tokens):
        for at in range(num_tokens):
            self._cell([target], at)[0] = self._cell([source], at)[0]

    def _cell(self, blocks, at):
        start = blocks[at // 32] * self.block_bytes + 4 * (at % 32)
        return self.arena[start : start + 4].cast("i")


def load(settings, counters):
    if "FAKE_LOAD_ERROR" in os.environ:
        raise ModelError(os.environ["FAKE_LOAD_ERROR"])
    geometry = ArenaGeometry(**settings.arena)
    arena = memoryview(mmap.mmap(settings.arena_fd, geometry.total_bytes))
    return FakeModel(arena, geometry.block_bytes, counters), TOKEN_BYTES


if __name__ == "__main__":
    if "FAKE_DIE_AT_START" in os.environ:
        os.kill(os.getpid(), int(os.environ["FAKE_DIE_AT_START"]))
    channel.SocketChannel = Channel
    messages.PROTOCOL_VERSION = int(os.environ.get("FAKE_PROTOCOL", messages.PROTOCOL_VERSION))
    if "FAKE_AFFINITY" in os.environ:
        real = os.sched_getaffinity
        os.sched_getaffinity = lambda pid: {*real(pid), 4095}
    sys.exit(main(sys.argv, load))
