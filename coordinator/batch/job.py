"""A batch run from its options to its end: opens everything in an order in which failing is cheap, runs, reports.

input, model, files of the run   what can be refused is refused before a process is started
engine and text helper           start side by side
rows                             the clock of `seconds` starts here: all workers are ready
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coremill.config.arena import BLOCK_TOKENS
from coremill.config.engine import EngineConfig
from coremill.config.errors import ConfigError, CoremillError, RequestError, RunError
from coremill.config.fingerprint import NUMERICS_VERSION, system_fingerprint, text_digest
from coremill.config.outputs import check_replaceable
from coremill.config.request import GenerationRequest, SamplingParams
from coremill.config.topology import CoreGroup, discover
from coremill.coordinator.batch.cpu import CpuUse
from coremill.coordinator.batch.feeder import Prepare, Rules
from coremill.coordinator.batch.plan import Setting
from coremill.coordinator.batch.reader import LineReader
from coremill.coordinator.batch.report import PlainReporter
from coremill.coordinator.batch.reproduce import reproducing
from coremill.coordinator.batch.results import LineMaker
from coremill.coordinator.batch.rowtable import RowTable
from coremill.coordinator.batch.runner import WINDOW_BYTES, Outcome, Runner
from coremill.coordinator.batch.slowly import Stage
from coremill.coordinator.batch.source import Source, open_source
from coremill.coordinator.batch.standing import check_input
from coremill.coordinator.batch.summary import stats_object
from coremill.coordinator.batch.watch import RunWatch
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
# A start of workers that takes longer, in seconds, is shown.
_SAID_AFTER = 1.0
# How write_stats begins every file.
_STATS_START = b'{\n "rows":'
_SPLIT_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Options of `coremill run`, under their own names. chat_given: somebody has said --chat or --no-chat."""

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
    any_model: bool = False
    chat: bool = False
    chat_given: bool = False
    system: str | None = None
    chat_template: str | None = None
    keep_changed: bool = False
    show: int = 0


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
        resolved = resolve_model(options.model, progress=reporter.stage)
        pack = stack.enter_context(open_pack(resolved.pack))
        ctx = options.engine.longest_request(pack.spec.context_length)
        template = read_template(options.chat_template)
        if source.is_terminal:
            reporter.say("reading prompts from the terminal, one a line; Ctrl-D on an empty line ends them")
        lines = LineReader(source, options.format)
        _check_chat(options, lines)
        table = RowTable()
        fingerprint = run_fingerprint(options, pack, ctx, lines.format, template)
        asked = {"input_identity": source.identity, "stats": options.stats, "tell": reporter.stage}
        files = stack.enter_context(ResultFiles(options.output, options.errors, fingerprint, table, **asked))
        for path in files.repaired:
            reporter.say(f"{path}: its last line was torn, as a crash leaves it, and has been cut off")
        names = model_names(pack, options.model)
        rules = _rules(options, names, ctx)
        outcome = _check_resume(options, source, lines, table, rules, reporter.stage)
        engine_stats, profiles = {"workers": []}, []
        startup_seconds = clock()
        if outcome is None:
            groups = discover(workers=options.engine.workers, cores_per_worker=options.engine.cores_per_worker)
            engine, prepare, cpu, watch = _start(
                stack, options, pack, files.started, groups, reporter, template, names[0]
            )
            startup_seconds = clock()
            continued = lines.format == "text" and not (rules.chat or options.chat_given) and bool(pack.chat_template)
            setting = replace(_setting(pack, engine, groups, ctx), continued=continued)
            reporter.attach(setting, _format_note(lines), watch)
            _listen(stack, watch, names[0], reporter)
            rules = replace(rules, arena_tokens=engine.stats(measure=False)["arena"]["blocks"] * BLOCK_TOKENS)
            system = system_fingerprint(pack.key, options.engine.kv)
            maker = LineMaker(names[0], system, reproducing(options, lines.format))
            runner = _runner(options, source, lines, files, table, rules, maker, prepare, engine, reporter, watch)
            outcome = runner.run()
            # A worker in a long step would keep the second of a Ctrl-C: then its last figures must do.
            engine_stats = engine.stats(measure=outcome.stopped is None) | {"cpu_seconds": cpu.report()}
            profiles = engine.profiles()
    return BatchEnd(outcome, stats_object(outcome, engine_stats, startup_seconds), profiles, resolved.changes())


def _start(
    stack: ExitStack,
    options: BatchOptions,
    pack: PackFile,
    now: datetime.datetime,
    groups: Sequence[CoreGroup],
    reporter: PlainReporter,
    template: str | None,
    name: str,
) -> tuple[Engine, Prepare, CpuUse, RunWatch]:
    """Engine and text helper; the engine is ready. now: what templates take for the present time. name: the model's."""
    from coremill.coordinator.text.service import TextService

    # The helper takes longest to load. Whatever is wrong with it is said by its first call.
    max_tokens = options.engine.longest_request(pack.spec.context_length)
    text = TextService(pack.path, template=template, now=now, max_tokens=max_tokens, on_death=reporter.helper_died)
    stack.callback(text.close)
    engine = Engine(pack.path, options.engine, groups, on_event=reporter.worker_event)
    stack.callback(engine.close)
    engine.start()
    watch = RunWatch(engine, name, options.input, options.output)  # while the workers start: it reads files
    while not engine.wait_ready(_SAID_AFTER):
        ready = sum(worker["state"] == "ready" for worker in engine.glance()["workers"])
        reporter.stage("starting workers", ready, len(groups))
    return engine, prepare_with(text), CpuUse(engine, text), watch


def _listen(stack: ExitStack, watch: RunWatch, model: str, reporter: PlainReporter) -> None:
    """Lets `coremill top` in. Without it the run goes on as well."""
    from coremill.coordinator.local_socket import LocalServer

    try:
        stack.enter_context(LocalServer("run", model, watch.handlers()))
    except (CoremillError, OSError) as error:
        reporter.say(f"coremill top cannot see this run: {error}")


def _rules(options: BatchOptions, names: Sequence[str], ctx: int) -> Rules:
    return Rules(
        None if options.any_model else frozenset(names),
        ctx,
        options.defaults,
        options.engine.seed,
        chat=options.chat or options.system is not None,
        system=options.system,
    )


def _check_resume(
    options: BatchOptions, source: Source, lines: LineReader, table: RowTable, rules: Rules, tell: Stage
) -> Outcome | None:
    """As check_input, when there is something to check and the input can be read twice."""
    if not len(table) or source.size is None or options.input == "-":
        return None
    retry = options.retry_errors or options.strict
    keep_changed, keep = options.keep_changed, options.show
    return check_input(
        options.input,
        lines.format,
        options.output,
        table,
        rules,
        retry=retry,
        keep_changed=keep_changed,
        keep=keep,
        tell=tell,
    )


def read_template(path: str | None) -> str | None:
    """The text of --chat-template."""
    if path is None:
        return None
    try:
        template = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {path}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"--chat-template {path}: {error.strerror}") from None
    if not template.strip():
        raise ConfigError(f"--chat-template {path}: the file is empty")
    return template


def _check_chat(options: BatchOptions, lines: LineReader) -> None:
    if lines.format != "text" and (options.chat or options.system is not None):
        name = "--chat" if options.chat else "--system"
        raise ConfigError(f"{name} is for plain text; {options.input} is JSON lines ({lines.why}), which say it by row")


def _runner(options, source: Source, lines, files, table, rules, maker, prepare, engine, reporter, watch) -> Runner:
    num_slots = len(engine.groups) * options.engine.max_active
    return Runner(
        lines,
        files,
        table,
        rules,
        maker,
        prepare=prepare,
        submit=engine.submit,
        window_rows=max(MIN_WINDOW_ROWS_IN_ORDER if options.in_order else MIN_WINDOW_ROWS, 4 * num_slots),
        window_bytes=max(WINDOW_BYTES, WINDOW_BYTES_PER_SLOT * num_slots),
        in_order=options.in_order,
        retry=options.retry_errors or options.strict,
        strict=options.strict,
        keep=options.show,
        reporter=reporter,
        interrupt_input=source.interrupt,
        cancelled=watch.cancelled,
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


def run_fingerprint(
    options: BatchOptions, pack: PackFile, ctx: int, format: str, template: str | None = None
) -> dict[str, Any]:
    """Everything but the rows themselves that results depend on. Values as JSON gives them back."""
    defaults = options.defaults
    chat = {"chat": True, "system": options.system} if options.chat or options.system is not None else {}
    return chat | {
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
        "template": text_digest(template or pack.chat_template),
        "numerics": NUMERICS_VERSION,
        "format": format,
    }


def _setting(pack: PackFile, engine: Engine, groups: Sequence[CoreGroup], ctx: int) -> Setting:
    stats = engine.stats(measure=False)
    scratch = sum(worker["scratch_bytes"] or 0 for worker in stats["workers"])
    arena = stats["arena"]["blocks"] * stats["arena"]["block_bytes"]
    isa = next((worker["isa"] for worker in stats["workers"] if worker["isa"]), None)
    return Setting(
        groups=tuple((group.cores, group.why) for group in groups),
        memory=(
            ("weights (once for all workers)", pack.data_length),
            ("scratch of all workers", scratch),
        ),
        ctx=ctx,
        multiplies=sum(matrix.n * matrix.k for matrix in pack.matrices.values()),
        rate=_EXPECTED_RATE[isa] * sum(len(group.cores) for group in groups) if isa in _EXPECTED_RATE else None,
        arena=arena,
        kv_block=(BLOCK_TOKENS, stats["arena"]["block_bytes"]),
        sharing=engine.config.prefix_cache,
    )


def _format_note(lines: LineReader) -> str:
    kind = "JSON lines" if lines.format == "jsonl" else "plain text, one prompt a line"
    return f"{kind} ({lines.why})"


def _check_stats_path(path: str | None) -> None:
    """Now rather than after hours of running."""
    if path == "-":
        raise ConfigError("--stats cannot be standard output: give a file name")
    if path is not None and (os.path.isdir(path) or not os.access(os.path.dirname(path) or ".", os.W_OK)):
        raise ConfigError(f"--stats is {path!r}: it must be a file in a folder that can be written")
    if path is not None:
        check_replaceable("--stats", path, _STATS_START, "the figures of a run")


def write_stats(path: str, stats: dict[str, Any]) -> None:
    """Whole or not at all: others may be waiting for the file. RunError when that is impossible."""
    beside = f"{path}.{os.getpid()}.tmp"
    try:
        with open(beside, "w") as file:
            json.dump(stats, file, indent=1)
            file.write("\n")
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # not even made, or on a broken disk
            os.unlink(beside)
        raise RunError(
            f"cannot write --stats {path}: {error.strerror}; results and errors are in their files"
        ) from None
