"""Worker processes: started, pinned, briefed, watched, reaped.

The life of one:

    spawn   python -m coremill.worker FD      it imports what it needs, then reads FD, the lifeline
    brief   pinned to its cores, then told its settings through the lifeline: no thread of it ever runs elsewhere
    ...     it lives as long as the lifeline is open on this side
    reap    its exit status, once the kernel says that nothing of it runs any more
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from coremill.config.cgroups import oom_kills
from coremill.config.cputimes import stat_fields
from coremill.config.errors import UnsupportedHostError, WorkerStartError
from coremill.config.hostfiles import HostFiles
from coremill.config.messages import Failed, Hello, Ready, Settings, encode
from coremill.config.topology import CoreGroup

# -P: what lies in the current folder must not stand in for a module of ours.
WORKER_COMMAND = (sys.executable, "-P", "-m", "coremill.worker")
# Signals that come from outside; every other death is the process' own doing.
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
# How long all workers together may take to leave once their lifelines have ended, in seconds.
_KILL_AFTER = 0.5


@dataclass(frozen=True, slots=True)
class Death:
    """How a process ended, for people; crashed: it did this to itself."""

    cause: str
    crashed: bool
    signal: int = 0


@dataclass(eq=False, slots=True)
class WorkerProcess:
    """One process, from spawn to reap. Its identity on the socket is never used again.

    num_heard: messages it has sent. stuck: why we have killed it, if we have.
    """

    index: int
    identity: bytes
    process: subprocess.Popen
    pidfd: int
    lifeline: int
    endpoint: str = ""
    hello: Hello | None = None
    ready: Ready | None = None
    failure: Failed | None = None
    num_heard: int = 0
    stuck: Death | None = None

    @property
    def pid(self) -> int:
        return self.process.pid


class WorkerPool:
    """The processes of one engine, at most one per core group at a time."""

    def __init__(self, groups: Sequence[CoreGroup], command: Sequence[str] = WORKER_COMMAND) -> None:
        self.groups = list(groups)
        self._command = tuple(command)
        self._num_started = 0
        self.processes: dict[int, WorkerProcess] = {}
        self._oom_kills = oom_kills(HostFiles())

    def spawn(self, index: int, inherited: Sequence[int]) -> WorkerProcess:
        """Start a process, which waits for `brief`. Descriptors in `inherited` keep their numbers in it."""
        self._num_started += 1
        read_end, write_end = os.pipe()
        # Blocked signals stay blocked over exec: Ctrl-C cannot kill it before it has said that it ignores it.
        blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = subprocess.Popen(
                [*self._command, str(read_end)], stdin=subprocess.DEVNULL, pass_fds=[read_end, *inherited]
            )
        except OSError as error:
            os.close(write_end)
            raise WorkerStartError(f"starting worker {index} ({self._command[0]}): {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
            os.close(read_end)
        identity = b"%d.%d" % (index, self._num_started)
        worker = WorkerProcess(index, identity, process, _pidfd(process), write_end)
        self.processes[index] = worker
        return worker

    def brief(self, worker: WorkerProcess, settings: Settings) -> None:
        """Pin it and tell it what to do. A process that is dead already is left to `reap`."""
        import psutil  # while the new process imports its own

        cores = list(self.groups[worker.index].cores)
        try:
            process = psutil.Process(worker.pid)
            if sorted(process.cpu_affinity()) != cores:  # where that is refused, what is right already is good enough
                process.cpu_affinity(cores)
            data = encode(settings)
            os.write(worker.lifeline, len(data).to_bytes(4, "little") + data)
        except (psutil.NoSuchProcess, BrokenPipeError):
            pass
        except (ValueError, OSError, psutil.AccessDenied) as error:
            raise UnsupportedHostError(f"pinning worker {worker.index} to CPUs {cores}: {error}") from error

    def check_affinity(self, worker: WorkerProcess) -> str | None:
        """None when it runs where it should, else what is wrong."""
        wanted, actual = set(self.groups[worker.index].cores), set(worker.hello.affinity)
        if wanted == actual:
            return None
        return (
            f"worker {worker.index} may run on CPUs {sorted(actual)} but was pinned to {sorted(wanted)}: "
            "something else (a cpuset, a supervisor) changes CPU affinity here"
        )

    def kill_stuck(self, worker: WorkerProcess, patience: float) -> None:
        """End a process that stands still. Whoever was stopped from outside has not done this to itself."""
        stopped = _is_stopped(worker.pid)
        why = f"stuck: {'stopped by a signal, ' if stopped else ''}no operation completed for {patience:g} s"
        worker.stuck = Death(why, not stopped, signal.SIGKILL)
        try:
            signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
        except ProcessLookupError:  # it has ended at this very moment
            worker.stuck = None

    def reap(self, worker: WorkerProcess) -> Death:
        """Collect a process whose pidfd is readable."""
        status = worker.process.wait()
        os.close(worker.pidfd)
        os.close(worker.lifeline)
        del self.processes[worker.index]
        if worker.stuck is not None and status == -signal.SIGKILL:
            return worker.stuck
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
            why = self._out_of_memory() if -status == signal.SIGKILL else ""
            return Death(f"killed by {name}{why}", -status not in _FROM_OUTSIDE, -status)
        if worker.failure is not None:
            return Death(f"{worker.failure.code}: {worker.failure.message}", True)
        return Death(f"exit code {status}", status != 0)

    def _out_of_memory(self) -> str:
        """What there is to say about a SIGKILL: the kernel counts those that it sends for want of memory."""
        before, self._oom_kills = self._oom_kills, oom_kills(HostFiles())
        return " (memory had run out, says the kernel)" if self._oom_kills > before else ""

    def close(self) -> None:
        """End every process and wait for it: they leave when their lifeline ends, or are killed."""
        workers = list(self.processes.values())
        for worker in workers:
            os.close(worker.lifeline)
        deadline = time.monotonic() + _KILL_AFTER
        for worker in workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            os.close(worker.pidfd)
        self.processes.clear()

    def forget_in_child(self) -> None:
        """After a fork: our copies of the lifelines must not keep the workers alive."""
        for worker in self.processes.values():
            os.close(worker.lifeline)
            os.close(worker.pidfd)
        self.processes.clear()


def _is_stopped(pid: int) -> bool:
    try:
        return stat_fields(pid)[0] in (b"T", b"t")
    except OSError:  # gone
        return False


def _pidfd(process: subprocess.Popen) -> int:
    try:
        return os.pidfd_open(process.pid)
    except OSError as error:
        process.kill()
        process.wait()
        raise UnsupportedHostError(f"pidfd_open: {error.strerror}; Linux 5.3 or newer is needed") from error
