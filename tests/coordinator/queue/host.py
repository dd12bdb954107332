"""A process with a Coordinator whose workers have make-believe models, for tests that kill it.

host.py PACK QUEUE produce     submits jobs and says "accepted ID" and "done ID TEXT" until it is killed
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FAKE_WORKER = Path(__file__).parent.parent / "fake_worker.py"


def use_fake_workers() -> None:
    """For every Coordinator of this process."""
    from coremill.config.topology import CoreGroup
    from coremill.coordinator.engine import Engine
    from coremill.coordinator.python import local

    def new_engine(pack_path, config, on_event):
        cores = sorted(os.sched_getaffinity(0))
        groups = [CoreGroup((cores[index % len(cores)],)) for index in range(config.workers or 1)]
        command = (sys.executable, str(FAKE_WORKER))
        return Engine(pack_path, config, groups, on_event=on_event, worker_command=command, stop_ids=(0,))

    local._new_engine = new_engine


def produce(pack: str, queue: str) -> None:
    from coremill.coordinator import Coordinator

    def say(*words: str) -> None:
        os.write(1, (" ".join(words) + "\n").encode())  # whole lines, from any thread

    with Coordinator(pack, queue=queue, ctx=400) as c:
        for n in range(10**6):
            job = c.submit(prompt_ids=[n % 60 + 1], max_tokens=20, id=f"id-{n}")
            say("accepted", job.id)
            job.add_done_callback(
                lambda job: say("done", job.id, job.result().text) if job.exception() is None else None
            )


if __name__ == "__main__":
    use_fake_workers()
    {"produce": produce}[sys.argv[3]](*sys.argv[1:3])
