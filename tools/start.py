"""Where the `coremill` command begins: what holds for the process, before anything that takes time is imported."""

from __future__ import annotations

import signal
import sys


def start() -> None:
    """Runs the command line of this process; ends with its exit code."""
    try:
        # As Ctrl-C does it: what has been started is ended, and what lies in temporary folders goes.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        from coremill.tools.streams import make_steady

        make_steady()
        from coremill.tools.cli import main

        main(prog_name="coremill")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
