"""Files that a command replaces as a whole: only such as it may have written itself."""

from __future__ import annotations

import os
import stat

from coremill.config.errors import ConfigError


def check_replaceable(name: str, path: str, start: bytes, kind: str) -> None:
    """For before the work begins. ConfigError unless `path` is free, empty, or begins with `start`.

    name: the option that gives the path; kind: what a file that begins so is, for the message.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigError(f"{name} {path}: it is not a regular file")
        with open(path, "rb", buffering=0) as file:
            found = file.read(len(start))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{name} {path}: {error.strerror}") from None
    if found not in (b"", start):
        raise ConfigError(f"{name} {path}: the file exists and is not {kind}; it is not replaced: choose another name")
