"""A worker process: `python -m coremill.worker FD`.

FD is the lifeline, a pipe whose other end the coordinator holds. It first carries this worker's settings; when
it ends, the coordinator is gone and so is this process, whatever it is doing.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

# What nobody handled. The coordinator tells its cause from the Failed message sent before.
EXIT_FAILED = 1


def main(argv: list[str], load_model: Callable[..., tuple[Any, Any]] | None = None) -> int:
    """Serve one coordinator. load_model(settings, counters) -> (model, token bytes); None: the packed model."""
    # Ctrl-C reaches every process of the terminal, but only the coordinator decides what it means. It started us
    # with the signal blocked, so that there is no moment in which it would kill.
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    lifeline = int(argv[1])

    from coremill.worker.channel import SocketChannel, read_settings

    settings = read_settings(lifeline)
    if settings is None:  # the coordinator left before it said anything
        return 0
    _watch(lifeline)

    from coremill.config.messages import PROTOCOL_VERSION, Hello

    channel = SocketChannel(settings.endpoint, settings.identity)
    affinity = tuple(sorted(os.sched_getaffinity(0)))
    channel.send(Hello(PROTOCOL_VERSION, settings.worker, os.getpid(), affinity))
    if len(settings.cores) > 1:
        status = _on_first_core(settings.cores[0], lambda: _serve(channel, settings, load_model))
    else:
        status = _serve(channel, settings, load_model)
    channel.close()
    return status


def _serve(channel: Any, settings: Any, load_model: Callable[..., tuple[Any, Any]] | None) -> int:
    """Load the model and run until Stop; the exit status."""
    from coremill.config.counters import CounterPage
    from coremill.config.messages import Failed, Ready

    try:
        begun = time.monotonic()
        if load_model is None:
            from coremill.worker.loading import load_packed_model as load_model
        counters = CounterPage(settings.counters_fd)
        model, token_bytes = load_model(settings, counters)
        loop = _make_loop(channel, model, token_bytes, settings, counters)
        channel.send(Ready(_isa(), model.scratch_bytes, time.monotonic() - begun))
        loop.run()
    except Exception as error:
        # The one place that catches everything: the coordinator passes it on with its traceback.
        text = str(error) or type(error).__name__
        channel.send(Failed(None, type(error).__name__, text, traceback.format_exc()))
        return EXIT_FAILED
    return 0


def _on_first_core(core: int, serve: Callable[[], int]) -> int:
    """Run `serve` on a thread of its own, pinned to one core of the group: native gives each of the others its
    thread, and a step waits for the slowest. The process as a whole keeps the group's affinity."""
    import threading

    status = [EXIT_FAILED]

    def run() -> None:
        os.sched_setaffinity(0, {core})
        status[0] = serve()

    thread = threading.Thread(target=run, name="coremill-step")
    thread.start()
    thread.join()
    return status[0]


def _watch(lifeline: int) -> None:
    from coremill.config.errors import EngineError
    from coremill.native import ffi, lib

    err = ffi.new("char[]", 512)
    if lib.cm_watch_parent(lifeline, err, len(err)) < 0:
        raise EngineError(ffi.string(err).decode(errors="replace"))


def _isa() -> str:
    from coremill.native import ffi, lib

    return ffi.string(lib.cm_isa_active()).decode()


def _make_loop(channel, model, token_bytes, settings, counters):
    from coremill.config.smaps import measure_memory
    from coremill.native.arena import ARENA_NAME
    from coremill.worker.loop import WorkerLoop

    make: Callable[..., WorkerLoop] = WorkerLoop
    if poison := os.environ.get("COREMILL_TEST_POISON"):
        from functools import partial

        from coremill.worker.testhooks import PoisonedLoop

        make = partial(PoisonedLoop, poison=poison)
    return make(
        channel,
        model,
        token_bytes,
        step_tokens=settings.step_tokens,
        num_threads=len(settings.cores),
        counters=counters,
        measure=lambda: measure_memory(os.path.realpath(settings.pack), ARENA_NAME),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
