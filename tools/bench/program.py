"""Peers that are libraries: their own Python runs a script of ours from tools/peers/, a process for each round.

    rows of the file --rendered here--> texts --> JSON file --> script: load, answer all, count --> JSON file

All get the same texts, answer greedily, and stop after the row's max_tokens or where the model ends. Loading is not
counted: the script takes the time from the prompts to the last answer.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coremill.config.errors import ConfigError, EngineError, RequestError
from coremill.tools.bench.rounds import Run, how_it_ended
from coremill.tools.bench.rows import numbered_lines

SCRIPTS = Path(__file__).parent.parent / "peers"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row as a library takes it."""

    text: str
    max_tokens: int


def render_prompts(path: Path, model: str) -> list[Prompt]:
    """Rows of a batch file through the model's own chat template.

    ConfigError names the line whose row a greedy library cannot be asked the same.
    """
    from coremill.config.request import parse_line
    from coremill.coordinator.text.prompts import Preparer
    from coremill.coordinator.text.requests import TextRequest
    from coremill.native.cache import ensure_pack
    from coremill.native.packfile import open_pack

    with open_pack(ensure_pack(model)) as pack:
        preparer = Preparer(pack.tokenizer, datetime.datetime.now())
    prompts = []
    for number, line in numbered_lines(path):
        try:
            request = parse_line(line, number)
            _check_plain(request)
            text = request.prompt if request.messages is None else preparer.render(TextRequest(request.messages))
        except RequestError as error:
            raise ConfigError(f"{path}: line {number}: {error}") from None
        prompts.append(Prompt(text, request.sampling.max_tokens))
    if not prompts:
        raise ConfigError(f"{path}: no requests in it")
    return prompts


def _check_plain(request) -> None:
    sampling = request.sampling
    if sampling.temperature != 0:
        problem = f"'temperature' is {sampling.temperature:g}: with a library as the peer it must be 0"
        raise RequestError("invalid_value", problem, "temperature")
    if sampling.max_tokens is None:
        raise RequestError("invalid_value", "'max_tokens' is missing: with a library as the peer it must be given")
    if sampling.stop:
        raise RequestError("invalid_value", "'stop' is given: with a library as the peer it cannot be", "stop")
    if request.prompt is not None and not isinstance(request.prompt, str):
        raise RequestError("invalid_value", "'prompt' holds token ids: with a library as the peer it must be a text")


def run_program(
    python: str, script: str, model: str, prompts: Sequence[Prompt], *, strong: bool, warm_prefix: bool
) -> Run:
    """One process of the peer's Python over all prompts. EngineError with its last line when it fails.

    strong: with the settings that are best for batches, instead of as it comes. warm_prefix: the first prompt is
    answered alone before the others, within the time, so that what they share is computed once.
    """
    job = {
        "model": model,
        "prompts": [{"text": prompt.text, "max_tokens": prompt.max_tokens} for prompt in prompts],
        "strong": strong,
        "warm_prefix": warm_prefix,
    }
    with tempfile.TemporaryDirectory(prefix="coremill-bench-") as folder:
        asked, answered = Path(folder, "job.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(job))
        # Isolated: the script's folder must not stand in the way of the peer's own modules.
        command = [python, "-I", str(SCRIPTS / script), str(asked), str(answered)]
        try:
            done = subprocess.run(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise EngineError(f"{python}: {error.strerror}") from None
        if done.returncode or not answered.exists():
            raise EngineError(f"{script} {how_it_ended(done.returncode, done.stderr)}")
        result = json.loads(answered.read_text())
    names = ("seconds", "rows", "errors", "prompt_tokens", "completion_tokens")
    return Run("peer", *(result[name] for name in names), ready_seconds=result["ready_seconds"])
