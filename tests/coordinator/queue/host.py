"""A process with a coordinator whose workers have make-believe models, for tests that kill it.

host.py PACK QUEUE produce     submits jobs and says "accepted ID" and "done ID TEXT" until it is killed
host.py PACK QUEUE serve       a resident coordinator; says "worker PID" of each and "ready ADDRESS"
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

FAKE_WORKER = Path(__file__).parent.parent / "fake_worker.py"


def use_fake_workers() -> None:
    """For every coordinator that this process makes from now on."""
    from coremill.config.topology import CoreGroup
    from coremill.coordinator.engine import Engine
    from coremill.coordinator.python import local

    def new_engine(pack_path, config, on_event):
        cores = sorted(os.sched_getaffinity(0))
        groups = [CoreGroup((cores[index % len(cores)],)) for index in range(config.workers or 1)]
        command = (sys.executable, str(FAKE_WORKER))
        return Engine(pack_path, config, groups, on_event=on_event, worker_command=command, stop_ids=(0,))

    local._new_engine = new_engine


def say(*words: object) -> None:
    """Whole lines, from any thread."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def produce(pack: str, queue: str) -> None:
    from coremill.coordinator import Coordinator

    def ended(job) -> None:
        if job.exception() is None:
            say("done", job.id, job.result().text)

    with Coordinator(pack, queue=queue, ctx=400) as c:
        for n in range(10**6):
            job = c.submit(prompt_ids=[n % 60 + 1], max_tokens=20, id=f"id-{n}")
            say("accepted", job.id)
            job.add_done_callback(ended)


def serve(pack: str, queue: str) -> None:
    from coremill.config.engine import EngineConfig
    from coremill.coordinator.attach.resident import Resident

    with Resident(pack, EngineConfig(ctx=400, workers=2), queue=queue or None, on_event=started) as resident:
        resident.wait_ready()
        say("ready", resident.address)
        threading.Event().wait()


def started(event: dict) -> None:
    if event["event"] == "worker_started":
        say("worker", event["pid"])


if __name__ == "__main__":
    use_fake_workers()
    {"produce": produce, "serve": serve}[sys.argv[3]](*sys.argv[1:3])
