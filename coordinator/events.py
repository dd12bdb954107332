"""What the scheduler is told, and what it asks for. Both are plain values, so that tests compare lists."""

from __future__ import annotations

from dataclasses import dataclass

from coremill.config.messages import Begin, Borrow, Cancel, Extend, Failed, Ready, Release, Released, Stepped, Stop
from coremill.config.request import SequenceRequest, SequenceResult

# ---- events ----


@dataclass(frozen=True, slots=True)
class Submitted:
    ticket: int
    request: SequenceRequest


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody wants the sequence any more. May come after its end."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Watched:
    """Somebody reads the sequence's text as it comes. May come after its end."""

    ticket: int


@dataclass(frozen=True, slots=True)
class FromWorker:
    worker: int
    message: Ready | Stepped | Released | Failed


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker is gone and reaped: it can touch no block any more.

    cause: for people ("killed by SIGSEGV", "exit code 1"); crashed: it did this to itself, nobody killed it.
    alone: the lease that had the step for itself when it died, 0 when there was none.
    hopeless: it said that it can never start (a model file that cannot be mapped, ...).
    """

    worker: int
    cause: str
    crashed: bool
    alone: int = 0
    hopeless: bool = False


@dataclass(frozen=True, slots=True)
class Workers:
    """Run on the first `count` places from now on; at least 1."""

    count: int


@dataclass(frozen=True, slots=True)
class Paused:
    """Whether everything rests from now on: who runs stops at its next step boundary and loses nothing."""

    paused: bool


@dataclass(frozen=True, slots=True)
class Closing:
    """Finish everything as it stands, with this error."""

    code: str = "engine_closed"
    reason: str = "the engine was closed before this request was done"


Event = Submitted | Cancelled | Watched | FromWorker | WorkerDied | Workers | Paused | Closing

# ---- instructions ----


@dataclass(frozen=True, slots=True)
class StartWorker:
    worker: int


@dataclass(frozen=True, slots=True)
class RetireWorker:
    """Do not start it again; the others go on."""

    worker: int
    cause: str


@dataclass(frozen=True, slots=True)
class WorkerStopped:
    """It was not needed any more and has left; StartWorker may bring it back."""

    worker: int


@dataclass(frozen=True, slots=True)
class Send:
    worker: int
    message: Begin | Extend | Cancel | Release | Borrow | Stop


@dataclass(frozen=True, slots=True)
class Show:
    """The next bytes of the text of a sequence that is watched; all of them, the last ones before its Finish."""

    ticket: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Finish:
    ticket: int
    result: SequenceResult


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The engine cannot go on: every sequence has been finished with this reason."""

    reason: str


Instruction = StartWorker | RetireWorker | WorkerStopped | Send | Show | Finish | GiveUp
