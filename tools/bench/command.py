"""`coremill bench` and the words behind it. What they do is in the modules beside this one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from coremill.config.settings import Settings
from coremill.tools.options import Verb, VerbGroup, takes


@click.group(
    cls=VerbGroup,
    invoke_without_command=True,
    examples=[
        ("coremill bench -m smollm2", "everything about a model on this machine (some minutes)"),
        ("coremill bench -m smollm2 --quick", "a first look"),
        ("coremill bench --roofline", "only what the machine can do"),
        ("coremill bench -m model.gguf --json > bench.json", "figures for a script"),
        ("coremill bench start -m smollm2", "time to the first token, cost of a second worker"),
        ("coremill bench tail -m smollm2", "whether all workers have work to the end of a file"),
        ("coremill bench queue -m smollm2", "what the Python interface costs"),
        ("coremill bench peer http://localhost:8080 prompts.jsonl -m model.gguf", "against another server"),
    ],
)
@takes("bench")
@click.pass_context
def command(context: click.Context, settings: Settings) -> None:
    """Measure this machine, a model's operations on it, and whole engines.

    Every figure stands beside its limit: the best the machine has shown in the same run. Medians of --rounds
    runs; noise is their spread.
    """
    if context.invoked_subcommand is not None:
        lost = [settings.source(name) for name in settings if settings.source(name).startswith("--")]
        if lost:
            raise click.UsageError(f"{lost[0]} goes behind the word '{context.invoked_subcommand}'", context)
        return
    from coremill.tools.bench.table import bench

    _show(settings, bench(settings, _progress(settings)))


@command.command(
    "start",
    cls=Verb,
    examples=[
        ("coremill bench start -m smollm2", "medians of three rounds"),
        ("coremill bench start -m model.gguf --rounds 9 --json", "for a script"),
    ],
)
@takes("bench start")
def start(settings: Settings) -> None:
    """Measure how soon a fresh `coremill run` has its first token, and what memory a second worker adds."""
    from coremill.tools.bench.start import bench_start

    _print(settings, bench_start(settings, _speaks(settings)))


@command.command(
    "tail",
    cls=Verb,
    examples=[
        ("coremill bench tail -m smollm2", "40 uneven rows, three rounds"),
        ("coremill bench tail -m model.gguf --no-lending --rounds 9 --json", "for a script"),
    ],
)
@takes("bench tail")
def tail(settings: Settings) -> None:
    """Measure whether all workers have something to do until the last of 40 uneven rows is done."""
    from coremill.tools.bench.tail import bench_tail

    _print(settings, bench_tail(settings, _speaks(settings)))


@command.command(
    "queue",
    cls=Verb,
    examples=[
        ("coremill bench queue -m smollm2", "medians of three rounds (some minutes)"),
        ("coremill bench queue -m smollm2 --rounds 1 --json", "for a script"),
    ],
)
@takes("bench queue")
def queue(settings: Settings) -> None:
    """Measure what the Python interface costs: latency, throughput of map, CPU time, urgent jobs beside others."""
    from coremill.tools.bench.queue import bench_queue

    _print(settings, bench_queue(settings, _speaks(settings)))


@command.command(
    "peer",
    cls=Verb,
    examples=[
        ("coremill bench peer http://localhost:8080 prompts.jsonl -m model.gguf", "a server, three rounds in turns"),
        (
            "coremill bench peer llama.cpp prompts.jsonl -m model-q4_1.gguf --peer-program llama-server"
            " --peer-model model-q4_0.gguf",
            "a fresh server for each round, both files",
        ),
        (
            "coremill bench peer openvino prompts.jsonl -m model.gguf --peer-program venv/bin/python --warm-prefix",
            "a library in its own environment, as it comes and with its best settings",
        ),
    ],
)
@click.argument("peer")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@takes("bench peer")
def peer(settings: Settings, peer: str, file: Path) -> None:
    """Run the batch file FILE through coremill and through another engine, in turns.

    PEER is the URL of a server that speaks OpenAI's API, or one of llama.cpp, openvino and vllm, which are started
    for each round with --peer-program. All are asked for the same texts; starting is not counted.
    """
    from coremill.tools.bench.peer import bench_peer

    _print(settings, bench_peer(peer, file, settings, _speaks(settings)))


@command.command(
    "shape",
    cls=Verb,
    examples=[
        ("coremill bench shape llama-3.2-1b", "the table for a model of this shape with random Q4_K weights"),
        ("coremill bench shape llama-3.1-8b --weights q8_0 --quick", "fewer sizes"),
        ("coremill bench shape llama-3.1-8b -o big.gguf", "only the file, for other commands"),
    ],
)
@click.argument("name", metavar="NAME")
@takes("bench shape")
def shape(settings: Settings, name: str) -> None:
    """Measure a model of a known shape (llama-3.2-1b, qwen2.5-1.5b, llama-3.1-8b) with random weights.

    The file and its pack are made in the cache folder and removed at the end.
    """
    from coremill.tools.bench.shapes import bench_shape, write_shape

    if settings["output"] is not None:
        _print(settings, write_shape(name, settings, _speaks(settings)))
        return
    _show(settings, bench_shape(name, settings, _progress(settings)))


@command.command(
    "workers",
    cls=Verb,
    examples=[
        ("coremill bench workers -m smollm2", "1, 2, 4, ... workers, up to one for each core group"),
        ("coremill bench workers -m smollm2 --json > workers.json", "for `coremill bench draw`"),
    ],
)
@takes("bench workers")
def workers(settings: Settings) -> None:
    """Measure throughput, time and CPU use over the number of workers."""
    from coremill.tools.bench.workers import bench_workers, workers_text

    report = bench_workers(settings, _progress(settings))
    if not settings["json"]:
        click.echo(workers_text(report), nl=False)
    _print(settings, report)


@command.command(
    "coordinator",
    cls=Verb,
    examples=[
        ("coremill bench coordinator", "8, 64 and 192 make-believe workers"),
        ("coremill bench coordinator --workers 64 --step-seconds 0.02", "as many messages as real workers would send"),
    ],
)
@takes("bench coordinator")
def coordinator(settings: Settings) -> None:
    """Measure the coordinator alone, with workers that speak the real protocol and compute nothing."""
    from coremill.tools.bench.coordinator import bench_coordinator, coordinator_text

    report = bench_coordinator(settings, _progress(settings))
    if not settings["json"]:
        click.echo(coordinator_text(report), nl=False)
    _print(settings, report)


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@command.command(
    "estimate",
    cls=Verb,
    examples=[
        ("coremill bench -m smollm2 --json > bench.json", "one core's steps, and more"),
        ("coremill bench coordinator --json > coordinator.json", "the coordinator's messages"),
        ("coremill bench estimate bench.json coordinator.json", "8, 64 and 192 cores on paper"),
    ],
)
@click.argument("bench", type=_FILE)
@click.argument("coordinator", type=_FILE)
@takes("bench estimate")
def estimate(settings: Settings, bench: Path, coordinator: Path) -> None:
    """Estimate what 8, 64 and 192 cores would do, from the JSON of `bench` and of `bench coordinator`."""
    from coremill.tools.bench.estimate import bench_estimate, estimate_text

    report = bench_estimate(bench, coordinator)
    if not settings["json"]:
        click.echo(estimate_text(report), nl=False)
    _print(settings, report)


@command.command(
    "draw",
    cls=Verb,
    examples=[
        ("coremill bench draw bench.json workers.json -o bench.svg", "over batch, context and workers"),
    ],
)
@click.argument("files", nargs=-1, required=True, type=_FILE)
@takes("bench draw")
def draw(settings: Settings, files: tuple[Path, ...]) -> None:
    """Draw throughput over batch, context and workers, from the JSON of `bench` and `bench workers`."""
    from coremill.tools.bench.draw import draw_files

    out = Path(settings.require("output"))
    for title in draw_files(files, out):
        click.echo(f"{out}: {title}")


def _progress(settings: Settings) -> Callable[[str], None]:
    """Where lines about what is being done go: stderr, and nowhere when nobody watches a text being made."""
    quiet = not settings["json"] and not sys.stderr.isatty()
    return lambda line: None if quiet else click.echo(line, err=True)


def _speaks(settings: Settings) -> Callable[[str], None]:
    """Where the lines of a text for people go: they are the result, unless that is to be JSON."""
    return _progress(settings) if settings["json"] else click.echo


def _show(settings: Settings, report: dict[str, Any]) -> None:
    """The table of `coremill bench`."""
    if not settings["json"]:
        from coremill.tools.bench.text import report_text

        click.echo(report_text(report), nl=False)
    _print(settings, report)


def _print(settings: Settings, report: dict[str, Any]) -> None:
    """The report as JSON, if that is wanted."""
    if settings["json"]:
        import json

        click.echo(json.dumps(report, indent=2))
