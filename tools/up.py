"""`coremill up`: a resident coordinator that other processes attach to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from coremill.config.settings import Settings
from coremill.tools.options import Verb, takes

if TYPE_CHECKING:
    from coremill.coordinator.batch.report import PlainReporter

# Between looks whether the engine still runs, in seconds.
_LOOK_S = 0.5

_EXAMPLES = [
    ("coremill up -m smollm2", "programs attach with Coordinator.attach()"),
    ("coremill up -m smollm2 --queue jobs.sqlite", "jobs survive crashes of everything"),
    ("coremill up --make-keys --keys keys", "keys for the network, once"),
    ("coremill up -m smollm2 --listen tcp://*:5050 --keys keys", "clients from other machines, by their keys"),
]


@click.command(cls=Verb, examples=_EXAMPLES)
@takes("up")
def command(settings: Settings) -> None:
    """Keep a model ready: programs submit jobs from any number of processes, which may end and come back.

    When all workers have loaded the model, standard output gets the line `ready ADDRESS`, and one more for --listen.
    Programs of the same user attach to it:

    \b
      from coremill.coordinator import Coordinator
      with Coordinator.attach() as c:
          print(c.submit("The capital of France is", id="order-1").result().text)

    Jobs submitted with an id go on when their program ends; others find them by that (`c.job("order-1")`), until their
    outcome has been acknowledged (`job.acknowledge()`). With --queue this holds for all jobs, and across crashes of
    this command, of workers and of the machine. Without, other jobs are cancelled when their program ends.

    `coremill top` watches it. With --log-format json, standard error gets an object a line for each thing that happens
    to workers. Ctrl-C and SIGTERM end it; what is unfinished stays in the queue.

    Exit code: 1 it could not start or go on, 2 wrong options, 4 the queue has unfinished jobs that were accepted with
    another model or other settings, 130 Ctrl-C, 143 SIGTERM.
    """
    from coremill.config.engine import EngineConfig
    from coremill.config.errors import ConfigError
    from coremill.coordinator.local_socket.keys import check_tcp, make_keys, server_keys

    if settings["make_keys"]:
        if settings["keys"] is None:
            raise ConfigError("--make-keys needs --keys FOLDER, the new folder for them")
        for path in make_keys(settings["keys"]):
            click.echo(path)
        return
    listen = None
    if settings["listen"] is not None:
        if settings["keys"] is None:
            raise ConfigError("--listen needs --keys: nobody is let in from the network without a listed key")
        listen = check_tcp(settings["listen"], "--listen"), server_keys(settings["keys"])
    elif settings["keys"] is not None:
        raise ConfigError("--keys is for --listen, which is missing")
    from coremill.coordinator.attach.resident import Resident
    from coremill.coordinator.batch.report import line_reporter

    reporter = line_reporter(settings["log_format"])
    resident = Resident(
        settings.require("model"),
        EngineConfig.from_settings(settings),
        queue=settings["queue"],
        keep=settings["keep"],
        listen=listen,
        on_event=reporter.worker_event,
        progress=reporter.stage,
    )
    with resident, _said_at_the_end(resident, settings["queue"], reporter):
        reporter.stage("starting workers", 0, 0)
        resident.wait_ready()
        for address in (resident.address, resident.tcp_address):
            if address is not None:
                click.echo(f"ready {address}")
        while resident.failure is None:
            threading.Event().wait(_LOOK_S)
        raise resident.failure


@contextlib.contextmanager
def _said_at_the_end(resident: Any, queue: str | None, reporter: PlainReporter) -> Iterator[None]:
    try:
        yield
    finally:
        found = resident.stats()
        unfinished = found["waiting"] + found["begun"]
        kept = f"stay in {queue}" if queue is not None else "are lost, as there is no --queue"
        if unfinished or found["done"]:
            lines = [f"{unfinished} unfinished and {found['done']} unread jobs {kept}"]
            reporter.tell("end", lines, queue=queue, unfinished=unfinished, unread=found["done"])
