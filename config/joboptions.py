"""How a request is queued, apart from what it asks: for the Python interface and whoever stands in front of it."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from coremill.config.errors import ConfigError, RequestError
from coremill.config.request_fields import check_int, check_number, invalid, shown

MAX_PRIORITY = (1 << 31) - 1
MAX_RETRIES = 100
# Of a timeout, in seconds: some thirty years.
MAX_TIMEOUT = 1e9


@dataclass(frozen=True, slots=True)
class JobOptions:
    """priority: higher runs first, and lower ones pause meanwhile. deadline: Unix time in seconds at which the job
    ends with an error if it is not done, None: never. retries: how often it is begun again after a failure that need
    not recur. attempt: runs of one request with different attempts draw different random numbers."""

    priority: int = 0
    deadline: float | None = None
    retries: int = 0
    attempt: int = 0

    def seconds_left(self) -> float | None:
        """Until the deadline; None without one."""
        return None if self.deadline is None else self.deadline - time.time()


OPTION_NAMES = ("priority", "deadline", "timeout", "retries")


def check_job_options(given: Mapping[str, Any]) -> JobOptions:
    """What `given` says of OPTION_NAMES, None for absent. timeout: seconds from now; with a deadline too, the earlier
    counts. RequestError names what is wrong."""
    ends = [end for end in (_deadline(given.get("deadline")), _end_of(given.get("timeout"))) if end is not None]
    priority, retries = given.get("priority"), given.get("retries")
    return JobOptions(
        priority=0 if priority is None else check_int(priority, "priority", -MAX_PRIORITY, MAX_PRIORITY),
        deadline=min(ends, default=None),
        retries=0 if retries is None else check_int(retries, "retries", 0, MAX_RETRIES),
    )


def _deadline(value: Any) -> float | None:
    if isinstance(value, datetime.datetime):
        try:
            return value.timestamp()
        except (OverflowError, ValueError, OSError):  # local time of the first or last years
            raise invalid("deadline", value, "a time that has a Unix time") from None
    return None if value is None else check_number(value, "deadline", 0, 1e11)


def _end_of(timeout: Any) -> float | None:
    if timeout is None:
        return None
    seconds = check_number(timeout, "timeout", 0, MAX_TIMEOUT)
    if not seconds:
        raise invalid("timeout", timeout, "more than 0 seconds")
    return time.time() + seconds


def check_wait(timeout: Any) -> float | None:
    """How long a call waits, in seconds, None for ever; what is below 0 is 0. ConfigError when it is no such number."""
    if timeout is None:
        return None
    if isinstance(timeout, Real) and not isinstance(timeout, bool) and timeout <= MAX_TIMEOUT:
        return float(max(0, timeout))
    raise ConfigError(f"timeout is {shown(timeout)}: it must be a number of seconds up to {MAX_TIMEOUT:g}, or None")


def too_late(options: JobOptions, begun: float) -> RequestError:
    """What ends a job at its deadline. begun: Unix time at which it was submitted."""
    allowed = max(0.0, (options.deadline or begun) - begun)
    return RequestError(
        "deadline_exceeded", f"the job was not done {allowed:.3g} s after it was submitted: its deadline has passed"
    )
