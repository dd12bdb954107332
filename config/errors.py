"""Every exception coremill raises on purpose, on one page.

CoremillError
 +-- ConfigError            an option, a variable or a configuration file is wrong
 +-- UnsupportedHostError   this machine or kernel cannot run what was asked
 +-- ModelError             a model file cannot be used
 |    +-- GGUFError         a GGUF file is malformed: names the field and the byte offset
 |    +-- PackError         a packed model is malformed, unwritable or out of date
 |    +-- UnsupportedModelError   well-formed, but needs something coremill does not have
 +-- RequestError           one request (row, job) is wrong or failed; the others run on
 +-- EngineError            the engine as a whole cannot go on
 |    +-- WorkerStartError  no worker could be started
 |    +-- EngineClosedError the coordinator was closed under a job
 +-- QueueFullError         the coordinator has as many unfinished jobs as it may have (max_queue)
 +-- QueueFileError         a queue file cannot be used: foreign, damaged, in use, or its disk is full
 +-- RunError               a batch run cannot start or resume
      +-- ResumeRefusedError  the earlier run used another model, seed, ... (named)
"""

from __future__ import annotations

from coremill.config.printable import brief

_MAX_PARAM_CHARS = 200


class CoremillError(Exception):
    """Base of all errors that coremill raises on purpose."""


class ConfigError(CoremillError):
    """A setting is wrong. The message names the setting, the value and the limit."""


class UnsupportedHostError(CoremillError):
    """This machine or kernel lacks something that was asked for."""


class ModelError(CoremillError):
    """A model file cannot be used."""


class GGUFError(ModelError):
    """A GGUF file is malformed.

    Attributes:
        path: the file.
        field: what was being read ("tensor 'output.weight' offset", ...).
        offset: byte offset in the file where the field starts, or None.
    """

    def __init__(self, path: object, field: str, problem: str, offset: int | None = None) -> None:
        self.path = str(path)
        self.field = field
        self.offset = offset
        where = "" if offset is None else f" at byte {offset}"
        super().__init__(f"{self.path}: {field}{where}: {problem}")


class PackError(ModelError):
    """A packed model is malformed, out of date, or could not be written."""


class UnsupportedModelError(ModelError):
    """A well-formed model needs an operation, format or tokenizer coremill does not have."""


class RequestError(CoremillError):
    """One request is wrong or failed. Carries what an OpenAI-style error object needs.

    Attributes:
        code: stable machine-readable word, e.g. "context_length_exceeded".
        param: dotted path of the offending field ("messages.0.content"), cut where it is very long, or None.
        message: one sentence naming field, value and limit.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        # A row may call its fields anything, at any length.
        self.param = None if param is None else brief(param, _MAX_PARAM_CHARS)

    def __reduce__(self) -> tuple:
        return (RequestError, (self.code, self.message, self.param))


class EngineError(CoremillError):
    """The engine as a whole cannot go on."""


class WorkerStartError(EngineError):
    """No worker process could be started, or all of them died at start."""


class EngineClosedError(EngineError):
    """The coordinator was closed while a job was waiting or running."""


class QueueFullError(CoremillError):
    """The coordinator has `max_queue` unfinished jobs, and the caller would not wait for one to end."""


class QueueFileError(CoremillError):
    """A durable queue's file cannot be used: foreign, damaged, in use by another process, or its disk is full."""


class RunError(CoremillError):
    """A batch run cannot start."""


class ResumeRefusedError(RunError):
    """The output belongs to a run with different settings; the message names them."""
