"""A batch run from its options to its end: opens everything in an order in which failing is cheap, runs, reports.

input, model, files of the run   what can be refused is refused before a process is started
engine and text helper           start side by side
rows                             the clock of `seconds` starts here: all workers are ready
"""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coremill.config.engine import EngineConfig
from coremill.config.errors import ConfigError, RequestError
from coremill.config.fingerprint import NUMERICS_VERSION, system_fingerprint, text_digest
from coremill.config.request import GenerationRequest, SamplingParams
from coremill.config.topology import CoreGroup, discover
from coremill.coordinator.batch.feeder import Prepare, Rules
from coremill.coordinator.batch.plan import Setting
from coremill.coordinator.batch.reader import LineReader
from coremill.coordinator.batch.report import PlainReporter
from coremill.coordinator.batch.results import LineMaker
from coremill.coordinator.batch.rowtable import RowTable
from coremill.coordinator.batch.runner import WINDOW_BYTES, Outcome, Runner
from coremill.coordinator.batch.source import Source, open_source
from coremill.coordinator.batch.summary import stats_object
from coremill.coordinator.batch.writer import ResultFiles
from coremill.coordinator.engine import Engine
from coremill.native.cache import resolve_model
from coremill.native.packfile import PackFile, open_pack

MIN_WINDOW_ROWS = 256
# In input order a long row holds the rows behind it back; this many may pass it meanwhile.
MIN_WINDOW_ROWS_IN_ORDER = 2048
WINDOW_BYTES_PER_SLOT = 32 << 10
# Multiplications per second and core of whole steps, for the estimate before anything has run; rough on purpose.
_EXPECTED_RATE = {"scalar": 1.5e9, "avx2": 5e10, "avx_vnni": 9e10, "avx512_vnni": 1e11}
_SPLIT_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Options of `coremill run`, under their own names."""

    input: str
    output: str
    model: str
    engine: EngineConfig
    defaults: SamplingParams
    errors: str | None = None
    format: str = "auto"
    retry_errors: bool = False
    in_order: bool = False
    strict: bool = False
    stats: str | None = None


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """How it went. stats: what --stats writes; profiles: Engine.profiles(); source_changes: what happened to
    the model's files meanwhile."""

    outcome: Outcome
    stats: dict[str, Any]
    profiles: list
    source_changes: list[str]


def run_batch(options: BatchOptions, reporter: PlainReporter, clock: Callable[[], float]) -> BatchEnd:
    """Runs the file. clock: seconds since the command began.

    Errors: RunError, ResumeRefusedError, ConfigError, ModelError, EngineError. Rows that finished before one of
    them are in the files, and the same command goes on from there.
    """
    with ExitStack() as stack:
        _check_stats_path(options.stats)
        source = open_source(options.input)
        stack.callback(source.close)
        resolved = resolve_model(options.model, progress=reporter.packing)
        pack = stack.enter_context(open_pack(resolved.pack))
        ctx = options.engine.longest_request(pack.spec.context_length)
        lines = LineReader(source, options.format)
        table = RowTable()
        files = ResultFiles(
            options.output,
            options.errors,
            run_fingerprint(options, pack, ctx, lines.format),
            table,
            input_identity=source.identity,
        )
        stack.callback(files.close)
        groups = discover(workers=options.engine.workers, cores_per_worker=options.engine.cores_per_worker)
        engine, prepare = _start(stack, options, pack, files.started, groups, reporter)
        startup_seconds = clock()
        reporter.attach(_setting(pack, engine, groups, ctx), _format_note(lines), lambda: engine.stats(measure=False))
        runner = _runner(options, source, lines, files, table, pack, ctx, prepare, engine, reporter)
        outcome = runner.run()
        # A worker in a long step would keep the second of a Ctrl-C: then its last figures must do.
        engine_stats = engine.stats(measure=outcome.stopped is None)
        profiles = engine.profiles()
    stats = stats_object(outcome, engine_stats, startup_seconds)
    if options.stats is not None:
        write_stats(options.stats, stats)
    return BatchEnd(outcome, stats, profiles, resolved.changes())


def _start(
    stack: ExitStack,
    options: BatchOptions,
    pack: PackFile,
    now: datetime.datetime,
    groups: Sequence[CoreGroup],
    reporter: PlainReporter,
) -> tuple[Engine, Prepare]:
    """Engine and text helper; the engine is ready. now: what templates take for the present time."""
    from coremill.coordinator.text.service import TextService

    # The helper takes longest to load. Whatever is wrong with it is said by its first call.
    text = TextService(pack.path, now=now, max_tokens=options.engine.longest_request(pack.spec.context_length))
    stack.callback(text.close)
    engine = Engine(pack.path, options.engine, groups, on_event=reporter.worker_event)
    stack.callback(engine.close)
    engine.start()
    engine.wait_ready()
    return engine, prepare_with(text)


def _runner(options, source: Source, lines, files, table, pack, ctx, prepare, engine, reporter) -> Runner:
    names = model_names(pack, options.model)
    num_slots = len(engine.groups) * options.engine.max_active
    return Runner(
        lines,
        files,
        table,
        Rules(frozenset(names), ctx, options.defaults, options.engine.seed),
        LineMaker(names[0], system_fingerprint(pack.key, options.engine.kv)),
        prepare=prepare,
        submit=engine.submit,
        window_rows=max(MIN_WINDOW_ROWS_IN_ORDER if options.in_order else MIN_WINDOW_ROWS, 4 * num_slots),
        window_bytes=max(WINDOW_BYTES, WINDOW_BYTES_PER_SLOT * num_slots),
        in_order=options.in_order,
        retry=options.retry_errors or options.strict,
        strict=options.strict,
        reporter=reporter,
        interrupt_input=source.interrupt,
    )


def prepare_with(text: Any) -> Prepare:
    """The text service as the feeder calls it."""
    from coremill.coordinator.text.requests import TextRequest

    def prepare(requests: Sequence[GenerationRequest]) -> list[tuple[int, ...] | RequestError]:
        asked = [
            TextRequest(messages=request.messages, prompt=request.prompt, allow_special=request.allow_special)
            for request in requests
        ]
        return [found if isinstance(found, RequestError) else found.ids for found in text.prepare(asked)]

    return prepare


def model_names(pack: PackFile, given: str) -> list[str]:
    """What a row may call the model. First the name results show: the stem of the model's file; then the name it was
    fetched by, its general.name, and `default`."""
    stem = Path(pack.description.get("source", {}).get("name") or pack.path.name).stem
    names = [_SPLIT_SUFFIX.sub("", stem), stem, pack.spec.name, "default"]
    if os.sep not in given and not given.endswith((".gguf", ".pack")):
        names.append(given)
    return [name for name in dict.fromkeys(names) if name]


def run_fingerprint(options: BatchOptions, pack: PackFile, ctx: int, format: str) -> dict[str, Any]:
    """Everything but the rows themselves that results depend on. Values as JSON gives them back."""
    defaults = options.defaults
    return {
        "model": pack.key,
        "kv": options.engine.kv,
        "ctx": ctx,
        "seed": options.engine.seed,
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "min_p": defaults.min_p,
        "max_tokens": defaults.max_tokens,
        "stop": list(defaults.stop),
        "template": text_digest(pack.chat_template),
        "numerics": NUMERICS_VERSION,
        "format": format,
    }


def _setting(pack: PackFile, engine: Engine, groups: Sequence[CoreGroup], ctx: int) -> Setting:
    stats = engine.stats(measure=False)
    scratch = sum(worker["scratch_bytes"] or 0 for worker in stats["workers"])
    arena = stats["arena"]["blocks"] * stats["arena"]["block_bytes"]
    isa = next((worker["isa"] for worker in stats["workers"] if worker["isa"]), None)
    num_cores = sum(len(group.cores) for group in groups)
    return Setting(
        groups=tuple((group.cores, group.why) for group in groups),
        memory=(
            ("weights (once for all workers)", pack.data_length),
            ("KV cache (as it fills, at most)", arena),
            ("scratch of all workers", scratch),
        ),
        ctx=ctx,
        multiplies=sum(matrix.n * matrix.k for matrix in pack.matrices.values()),
        rate=_EXPECTED_RATE[isa] * num_cores if isa in _EXPECTED_RATE else None,
    )


def _format_note(lines: LineReader) -> str:
    kind = "JSON lines" if lines.format == "jsonl" else "plain text, one prompt a line"
    return f"{kind} ({lines.why})"


def _check_stats_path(path: str | None) -> None:
    """Now rather than after hours of running."""
    if path is not None and (os.path.isdir(path) or not os.access(os.path.dirname(path) or ".", os.W_OK)):
        raise ConfigError(f"--stats is {path!r}: it must be a file in a folder that can be written")


def write_stats(path: str, stats: dict[str, Any]) -> None:
    """Whole or not at all: others may be waiting for the file."""
    beside = f"{path}.{os.getpid()}.tmp"
    with open(beside, "w") as file:
        json.dump(stats, file, indent=1)
        file.write("\n")
    os.replace(beside, path)
