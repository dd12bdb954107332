"""TOML files of options.

A file is flat: `name = value`, with the names of config/options.py. Everything in it is checked when it is read,
also what the verb at hand does not use: a typing error must not wait for the day it matters.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coremill.config.errors import ConfigError
from coremill.config.options import OPTIONS, nearest

LOCAL_FILE = "coremill.toml"

# Far beyond any real configuration; a mistyped path may lead to a model of gigabytes.
_MAX_FILE_BYTES = 1 << 20


def user_file(environ: Mapping[str, str]) -> Path | None:
    """$XDG_CONFIG_HOME/coremill/config.toml. None when there is no home to look in."""
    base = environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification says to ignore relative paths.
    if not os.path.isabs(base):
        home = environ.get("HOME", "")
        if not os.path.isabs(home):
            return None
        base = os.path.join(home, ".config")
    return Path(base, "coremill", "config.toml")


def config_files(named: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> list[Path]:
    """Files to read, the strongest first. A file that was named must exist, the others may."""
    found = [Path(named)] if named is not None else []
    for path in (Path(LOCAL_FILE), user_file(environ)):
        # Whatever has the name of a configuration file is meant as one: what cannot be read is an error, not ignored.
        if path is not None and os.path.lexists(path) and not any(_same(path, other) for other in found):
            found.append(path)
    return found


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def read_file(path: Path) -> dict[str, tuple[Any, str]]:
    """Option name -> (checked value, where it stands). ConfigError names file, key, value and limit."""
    values: dict[str, tuple[Any, str]] = {}
    given = _parse(path)
    for option in OPTIONS:
        if not option.in_files:
            continue
        for name in option.names:
            if name not in given:
                continue
            where = f"{path}: {name}"
            value = option.check(given.pop(name), where)
            if option.name in values:
                raise ConfigError(f"{where} and {option.name} are both given: give one")
            values[option.name] = (not value if name != option.name else value, where)
    if given:
        key = min(given)
        known = [name for option in OPTIONS if option.in_files for name in option.names]
        if isinstance(given[key], dict):
            raise ConfigError(f"{path}: unknown table '{key}': there are no tables, put options at the top of the file")
        raise ConfigError(f"{path}: unknown key '{key}'{nearest(key, known)}")
    return values


def _parse(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():  # a pipe that nobody writes to would be waited for
            raise ConfigError(f"configuration file {path}: it is not a regular file")
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror or error}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"configuration file {path} is larger than {_MAX_FILE_BYTES} bytes")
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration file {path}: not UTF-8 at byte {error.start}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"configuration file {path}: {error}") from None
    except ValueError:
        raise ConfigError(f"configuration file {path}: it has a number of more than 4300 digits") from None
