"""`coremill perplexity`: how well a model predicts a text, and its logits for comparison with other programs.

The text is tokenised as a whole (control token spellings are plain text; BOS first when the model adds one) and
cut into chunks of --ctx tokens, each computed on its own from position 0. When the model adds BOS, it replaces
the first token of every chunk. Of each chunk the second half is scored: with L tokens, those at L/2 + 1 to L - 1,
each given all before it in the chunk. Perplexity is exp of the mean of -ln p over all scored tokens. This is
how llama.cpp does it. A last chunk of fewer tokens is computed for --logits, but scored only if it is the only one.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coremill.config.errors import ConfigError, ModelError
from coremill.config.outputs import check_replaceable
from coremill.config.settings import Settings
from coremill.tools.options import Verb, takes

if TYPE_CHECKING:
    import numpy as np

    from coremill.native.packfile import PackFile
    from coremill.worker.model import WorkerModel

DEFAULT_CTX = 512

_NPY_MAGIC = b"\x93NUMPY"
# Between lines of progress when stderr is not a terminal.
_REPORT_SECONDS = 5.0
# Tokenizing more characters takes longer than a second.
_LONG_TEXT = 1 << 20


@dataclass(slots=True)
class Score:
    """Sums over the scored tokens: of -ln p and of its square."""

    num_scored: int = 0
    total: float = 0.0
    total_squares: float = 0.0

    @property
    def perplexity(self) -> float:
        return math.exp(self.total / self.num_scored)

    @property
    def standard_error(self) -> float:
        """Of the perplexity, from the spread of the tokens' -ln p."""
        if self.num_scored < 2:
            return math.inf
        mean = self.total / self.num_scored
        variance = max(self.total_squares / self.num_scored - mean * mean, 0.0)
        return self.perplexity * math.sqrt(variance / (self.num_scored - 1))


@click.command(
    cls=Verb,
    examples=[
        ("coremill perplexity wiki.txt -m smollm2", "perplexity in chunks of 512 tokens"),
        ("coremill perplexity wiki.txt -m model.gguf --ctx 2048 --json", "longer chunks, figures for a script"),
        ("coremill perplexity wiki.txt -m smollm2 --logits out.npy", "float32 [tokens][vocabulary] for numpy.load"),
    ],
)
@click.argument("file", metavar="FILE")
@takes("perplexity")
def command(settings: Settings, file: str) -> None:
    """Measure how well a model predicts the UTF-8 text in FILE (- reads standard input).

    The text is cut into chunks of --ctx tokens, each starting with BOS if the model uses it; the second half of each
    chunk is scored, as llama.cpp does. --logits keeps the logits of every token of the file.
    """
    from coremill.coordinator.text.tokenizer import ModelTokenizer
    from coremill.native.cache import ensure_pack
    from coremill.native.packfile import open_pack
    from coremill.tools.model_progress import ModelProgress

    if settings["logits"] is not None:
        check_replaceable("--logits", settings["logits"], _NPY_MAGIC, "an .npy file")
    text = _read(file)
    with ModelProgress() as progress:
        pack_path = ensure_pack(settings.require("model"), progress=progress)
    with open_pack(pack_path) as pack:
        ctx = settings["ctx"] or DEFAULT_CTX
        if ctx > pack.spec.context_length:
            raise ConfigError(f"ctx is {ctx}, but the model's context length is {pack.spec.context_length}")
        tokenizer = ModelTokenizer.from_description(pack.tokenizer)
        if len(text) >= _LONG_TEXT:
            click.echo(f"coremill: tokenizing {len(text):,} characters", err=True)
        ids = tokenizer.encode(text, add_bos=tokenizer.add_bos)
        if len(ids) < 4:
            raise ConfigError(f"{file}: its text is {len(ids)} tokens long; at least 4 are needed")
        chunks = chunks_of(ids, ctx, tokenizer.special.bos if tokenizer.add_bos else None)
        begin = time.monotonic()
        score = _measure(pack, settings, chunks, ctx)
        _print(settings, score, len(ids), chunks, ctx, time.monotonic() - begin)


def _read(file: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not valid UTF-8 at byte {error.start}") from error


def chunks_of(ids: Sequence[int], ctx: int, bos: int | None) -> list[list[int]]:
    """Chunks of ctx tokens, the last possibly shorter; with `bos`, that is the first token of each."""
    chunks = [list(ids[begin : begin + ctx]) for begin in range(0, len(ids), ctx)]
    if bos is not None:
        for chunk in chunks:
            chunk[0] = bos
    return chunks


def _measure(pack: PackFile, settings: Settings, chunks: list[list[int]], ctx: int) -> Score:
    score = Score()
    with (
        _model(pack, ctx, settings) as model,
        _logits_file(settings["logits"], sum(map(len, chunks)), pack.spec.vocab_size) as out,
        _Progress(len(chunks)) as progress,
    ):
        row = 0
        for number, chunk in enumerate(chunks):
            scored = len(chunk) == ctx or len(chunks) == 1
            for begin, logits in chunk_logits(model, chunk):
                if out is not None:
                    out[row : row + len(logits)] = logits
                row += len(logits)
                if scored:
                    add_scores(score, chunk, begin, logits)
            progress(number + 1, score)
    return score


def chunk_logits(model: WorkerModel, chunk: list[int]) -> Iterator[tuple[int, np.ndarray]]:
    """(first token, logits [rows][vocabulary]) of each step over one chunk; a view that the next step reuses."""
    import numpy as np

    from coremill.config.arena import blocks_for

    batch, blocks = model.new_batch(), list(range(blocks_for(len(chunk))))
    for begin in range(0, len(chunk), model.max_step_tokens):
        batch.clear()
        batch.add(chunk[begin : begin + model.max_step_tokens], begin, blocks)
        logits = np.frombuffer(model.logits_step(batch), np.float32)
        yield begin, logits.reshape(batch.num_rows, -1)


def add_scores(score: Score, chunk: list[int], begin: int, logits: np.ndarray) -> None:
    """Add the tokens that rows begin.. of the chunk predict, as far as they are in its second half.

    Raises:
        ModelError: a logit is not a finite number.
    """
    import numpy as np

    first, end = max(begin, len(chunk) // 2), min(begin + len(logits), len(chunk) - 1)
    if first >= end:
        return
    rows = logits[first - begin : end - begin]
    best = rows.max(axis=1)
    normalisers = best + np.log(np.exp(rows - best[:, None]).sum(axis=1, dtype=np.float64))
    surprises = normalisers - rows[np.arange(len(rows)), chunk[first + 1 : end + 1]]
    if not np.isfinite(surprises).all():
        raise ModelError("the model's logits are not finite numbers")
    score.num_scored += len(surprises)
    score.total += float(surprises.sum())
    score.total_squares += float((surprises * surprises).sum())


@contextmanager
def _model(pack: PackFile, ctx: int, settings: Settings) -> Iterator[WorkerModel]:
    from coremill.config.arena import ArenaGeometry, blocks_for
    from coremill.config.topology import groups_of, survey
    from coremill.native.arena import create_arena, map_arena
    from coremill.worker.model import WorkerModel

    found = survey()
    # One text at a time: all cores that may compute work on it together.
    cores = settings["cores_per_worker"] or len(groups_of(found))
    (group,) = groups_of(found, workers=1, cores_per_worker=cores)
    geometry = ArenaGeometry.for_model(pack.spec, blocks_for(ctx), settings["kv"])
    fd = create_arena(geometry)
    try:
        arena = map_arena(fd, geometry)
    finally:
        os.close(fd)
    with arena:
        model = WorkerModel(
            pack,
            arena,
            max_step_tokens=min(settings["step_tokens"], ctx),
            max_sequences=1,
            threads=len(group.cores),
            all_logits=True,
        )
        try:
            yield model
        finally:
            model.close()


@contextmanager
def _logits_file(path: str | None, num_rows: int, vocab_size: int) -> Iterator[Any]:
    """A float32 .npy of [num_rows][vocab_size] to fill, complete or not there at all; None without a path."""
    if path is None:
        yield None
        return
    import numpy as np

    part = f"{path}.{os.getpid()}.part"
    try:
        out = np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=(num_rows, vocab_size))
        # All of it now: a full disk would otherwise be a SIGBUS in the middle.
        with open(part, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        yield out
        out.flush()
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    finally:
        if os.path.exists(part):
            os.unlink(part)


class _Progress:
    """Chunks done and the perplexity so far, on stderr: a bar on a terminal, else a line now and then."""

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self._last = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("chunks", total=self._num_chunks)
        return self

    def __call__(self, done: int, score: Score) -> None:
        so_far = f"perplexity so far {score.perplexity:.4f}" if score.num_scored else "chunks"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=so_far)
        elif time.monotonic() - self._last > _REPORT_SECONDS:
            self._last = time.monotonic()
            print(f"coremill: chunk {done} of {self._num_chunks}, {so_far}", file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _print(
    settings: Settings, score: Score, num_tokens: int, chunks: list[list[int]], ctx: int, seconds: float
) -> None:
    unscored = len(chunks[-1]) if len(chunks) > 1 and len(chunks[-1]) < ctx else 0
    if settings["json"]:
        import json

        report = {
            "perplexity": score.perplexity,
            "standard_error": score.standard_error if score.num_scored > 1 else None,
            "mean_nll": score.total / score.num_scored,
            "scored_tokens": score.num_scored,
            "tokens": num_tokens,
            "chunks": len(chunks),
            "ctx": ctx,
            "unscored_tail_tokens": unscored,
            "logits": settings["logits"],
            "seconds": seconds,
        }
        click.echo(json.dumps(report, indent=2))
        return
    click.echo(f"perplexity  {score.perplexity:.4f} +/- {score.standard_error:.4f}")
    click.echo(f"scored      {score.num_scored:,} of {num_tokens:,} tokens, in chunks of {min(ctx, num_tokens):,}")
    if unscored:
        click.echo(f"not scored  the last {unscored:,} tokens, less than a chunk")
    if settings["logits"]:
        click.echo(f"logits      {settings['logits']}: float32 [{num_tokens:,}][vocabulary]")
    click.echo(f"speed       {num_tokens / seconds:,.0f} tokens/s")
