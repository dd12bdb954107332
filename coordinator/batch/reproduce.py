"""What runs one request alone again, for those that were set aside because workers died of them: a command for a row
of a file, a call for a job in Python."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from coremill.config.kinds import Flag
from coremill.config.options import BY_NAME, default_of, of_group

if TYPE_CHECKING:
    from coremill.config.engine import EngineConfig
    from coremill.config.request import GenerationRequest, SequenceRequest
    from coremill.coordinator.batch.job import BatchOptions

_READERS = {".gz": "zcat", ".zst": "zstdcat"}
# What concerns the run as a whole, not what becomes of a row.
_OF_THE_RUN = {"workers", "max_active", "arena", "profile", "prefix_cache", "lending", "stuck_after"}
_OF_ROWS = ("any_model", "chat", "system", "chat_template")


def reproducing(options: BatchOptions, format: str) -> Callable[[int], str]:
    """For the number of a line: a shell command that runs that row alone, with everything its result depends on.

    format: what the input was found to be.
    """
    settings = ["--format", format, "--workers", "1", *_switches(options)]
    command = f"coremill run - -m {shlex.quote(options.model)} {shlex.join(settings)} -o reproduce.jsonl"
    name = shlex.quote(options.input)
    reader = next((reader for suffix, reader in _READERS.items() if options.input.endswith(suffix)), None)

    def of_line(number: int) -> str:
        pick = f"sed -n '{number}{{p;q}}'"
        if options.input == "-":  # it cannot be had again from here
            return f"{pick} INPUT | {command}"
        return f"{reader} {name} | {pick} | {command}" if reader else f"{pick} {name} | {command}"

    return of_line


def reproducing_call(model: str, config: EngineConfig, request: GenerationRequest, sequence: SequenceRequest) -> str:
    """A call that runs a job alone, with everything its result depends on; dots for its text, which may be long."""
    names = [option.name for option in of_group("engine") if option.name not in _OF_THE_RUN and option.name != "seed"]
    settings = {"workers": 1} | _differing(config, names)
    source = "messages" if request.kind == "chat" else "prompt" if isinstance(request.prompt, str) else "prompt_ids"
    sampling = {"max_tokens": sequence.max_tokens, "seed": sequence.seed}
    sampling |= _differing(request.sampling, ("temperature", "top_p", "top_k", "min_p", "stop"))
    if request.allow_special:
        sampling["allow_special"] = True
    return (
        f"Coordinator({', '.join([repr(model), *_keywords(settings)])})"
        f".submit({', '.join([f'{source}=...', *_keywords(sampling)])})"
    )


def _differing(source: Any, names: Iterable[str]) -> dict[str, Any]:
    """What is not the default."""
    return {name: value for name in names if (value := getattr(source, name)) != default_of(name)}


def _keywords(values: dict[str, Any]) -> Iterator[str]:
    return (f"{name}={value!r}" for name, value in values.items())


def _switches(options: BatchOptions) -> Iterator[str]:
    """Those of the run's options that a row's result depends on and that are not the defaults."""
    for source, group in ((options.engine, "engine"), (options.defaults, "sampling")):
        for option in of_group(group):
            if option.name not in _OF_THE_RUN and "run" in option.verbs:
                yield from _switch(option.name, getattr(source, option.name))
    for name in _OF_ROWS:
        yield from _switch(name, getattr(options, name))


def _switch(name: str, value: Any) -> Iterator[str]:
    option = BY_NAME[name]
    if value == default_of(name):
        return
    if isinstance(option.kind, Flag):
        yield option.switch if value else option.switch.replace("--", "--no-", 1)
        return
    yield option.switch
    if isinstance(value, tuple):
        import json

        yield json.dumps(list(value))
    else:
        yield str(value)
