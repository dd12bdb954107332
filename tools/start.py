"""Where the `coremill` command begins: what holds for the process, before anything that takes time is imported."""

from __future__ import annotations

import resource
import signal
import sys

# Pipes, sockets and shared memory of two workers and a helper take some 40; each further worker a few.
_MIN_OPEN_FILES, _MAX_OPEN_FILES = 64, 65536


def start() -> None:
    """Runs the command line of this process; ends with its exit code."""
    try:
        # As Ctrl-C does it: what has been started is ended, and what lies in temporary folders goes.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        from coremill.tools.streams import make_steady

        make_steady()
        _raise_file_limit()
        from coremill.tools.cli import main

        main(prog_name="coremill")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _raise_file_limit() -> None:
    """The soft limit on open files is there for programs that use select(), which nothing here does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < _MIN_OPEN_FILES:
        sys.exit(f"coremill: the limit on open files is {wanted}: at least {_MIN_OPEN_FILES} are needed (`ulimit -n`)")
