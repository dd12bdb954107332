"""From all sources to one value per option: the order of precedence in code.

`Settings` also remembers where each value came from, so that a message about it can say so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from coremill.config.errors import ConfigError
from coremill.config.options import (
    BY_NAME,
    ENV_PREFIX,
    OPTIONS,
    PROCESS_VARIABLES,
    Option,
    nearest,
    of_group,
    of_verb,
)


class Settings(Mapping[str, Any]):
    """Values of options by name. `source(name)` says where one came from, "default" included."""

    def __init__(self, values: Mapping[str, tuple[Any, str]]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def source(self, name: str) -> str:
        return self._values[name][1]

    def given(self, name: str) -> bool:
        """Whether any source named the option."""
        return self.source(name) != "default"

    def require(self, name: str, place: str = "") -> Any:
        """The value of an option that a verb cannot do without. place: where else it may stand, as in "MODEL"."""
        if self[name] is None:
            option = BY_NAME[name]
            switch = f"{option.short}/{option.switch}" if option.short else option.switch
            files = f", or {name} in a configuration file" if option.in_files else ""
            what = f"missing {place}, or option {switch}" if place else f"missing option {switch}"
            raise ConfigError(f"{what} (or {option.variable} in the environment{files})")
        return self[name]

    def of_group(self, group: str) -> dict[str, Any]:
        """Values of the options of a group that are here: keywords for EngineConfig and SamplingParams."""
        return {option.name: self[option.name] for option in of_group(group) if option.name in self}


def from_command_line(
    verb: str, given: Mapping[str, str | bool | None], environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings of a verb. `given`: texts and flags from the command line, None where it says nothing.

    Raises:
        ConfigError: a value is outside its limits, or a file is missing, malformed or has an unknown key.
    """
    environ = os.environ if environ is None else environ
    options = of_verb(verb)
    spoken = {}
    for option in options:
        value = given.get(option.name)
        if value is not None:
            spoken[option.name] = (
                option.read(value, option.switch) if isinstance(value, str) else value,
                option.switch,
            )
    variables = _from_environment(options, environ)
    named = {**variables, **spoken}.get("config", (None, ""))[0]
    heard = {option.name for option in options if verb not in option.spoken_only}
    layers = [variables, *_from_files(named, environ)]
    unspoken = [{name: found for name, found in layer.items() if name in heard} for layer in layers]
    return _merged(options, [spoken, *unspoken])


def from_keywords(
    options: Iterable[Option], given: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings from Python keywords, then the environment, then the file of a keyword `config`, if given.

    None means: not given. ConfigError also for a keyword that is no option.
    """
    environ = os.environ if environ is None else environ
    options = tuple(options)
    known = {option.name: option for option in options} | {"config": BY_NAME["config"]}
    spoken = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"unknown option '{name}'{_hint(name, known)}")
        if value is not None:
            spoken[name] = (known[name].check(value, name), f"keyword {name}")
    named = spoken.pop("config", (None, ""))[0]
    layers = [spoken, _from_environment(options, environ)]
    if named is not None:
        from coremill.config.files import Path, read_file

        layers.append(read_file(Path(named)))
    return _merged(options, layers)


def _hint(name: str, known: Iterable[str]) -> str:
    option = BY_NAME.get(name)
    if option is not None and option.group == "sampling":
        return ": it belongs to each request, as in submit(..., temperature=0)"
    return nearest(name, known)


def _merged(options: Iterable[Option], layers: list[dict[str, tuple[Any, str]]]) -> Settings:
    values = {}
    for option in options:
        found = (layer[option.name] for layer in layers if option.name in layer)
        values[option.name] = next(found, (option.default, "default"))
    return Settings(values)


def _from_environment(options: Iterable[Option], environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    values: dict[str, tuple[Any, str]] = {}
    for option in options:
        for name in option.names:
            variable = ENV_PREFIX + name.upper()
            # Empty counts as absent, as everywhere: that is how a shell unsets for one command.
            text = environ.get(variable, "")
            if not text:
                continue
            value = option.read(text, variable)
            if option.name in values:
                raise ConfigError(f"{variable} and {option.variable} are both set: set one")
            values[option.name] = (not value if name != option.name else value, variable)
    return values


def _from_files(named: str | None, environ: Mapping[str, str]) -> list[dict[str, tuple[Any, str]]]:
    from coremill.config.files import config_files, read_file

    return [read_file(path) for path in config_files(named, environ)]


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """COREMILL_ variables that mean nothing, each with a hint: likely typing errors."""
    known = {ENV_PREFIX + name.upper() for option in OPTIONS for name in option.names} | set(PROCESS_VARIABLES)
    strangers = sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in known)
    # Tests and the worker's own start pass things along that are nobody's options.
    return [
        name + nearest(name, known)
        for name in strangers
        if not name.startswith((f"{ENV_PREFIX}TEST_", f"{ENV_PREFIX}_"))
    ]
