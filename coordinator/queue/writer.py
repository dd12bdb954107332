"""One thread that writes a store: whatever has come in since the last commit is one transaction."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from coremill.config.errors import CoremillError, EngineClosedError, EngineError, QueueFileError, RequestError
from coremill.coordinator.queue.store import Store

_RETRY_S = 1.0

log = logging.getLogger("coremill")


@dataclass(slots=True)
class _Task:
    """work: in the transaction. then: once it is on the disk, with what that returned; gives the answer, unless that
    comes later. must: until it is written."""

    work: Callable[[], Any]
    then: Callable[[Any], Any]
    answer: Future[Any]
    later: bool
    must: bool


class Turns(Protocol):
    """What is done besides tasks, on the writer's thread."""

    def in_transaction(self) -> Any:
        """At the end of each."""
        ...

    def committed(self, result: Any) -> float:
        """With what that returned. Seconds after which another turn is due, even when nothing has come in."""
        ...

    def end(self) -> None:
        """Nothing comes in any more but what must be written: see to it that this, too, ends."""
        ...

    def failed(self, error: CoremillError) -> None:
        """Nothing more will be done, ever."""
        ...


class Writer:
    """Tasks from any thread; work and turns on one of its own, until close()."""

    def __init__(self, store: Store, turns: Turns) -> None:
        self._store, self._turns = store, turns
        self._changed = threading.Condition(threading.RLock())
        self._inbox: deque[_Task] = deque()
        self.closing = False
        self.failure: CoremillError | None = None
        self._thread = threading.Thread(target=self._run, name="coremill-queue", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def post(
        self,
        work: Callable[[], Any] = lambda: None,
        then: Callable[[Any], Any] = lambda result: None,
        *,
        must: bool = False,
        answer: Future[Any] | None = None,
    ) -> Future[Any]:
        """A task for the next transaction. The answer: what `then` makes of what `work` returned, or
        a RequestError of either.

        answer: one that `then` takes care of. must: it is written, or tried again until it is. Otherwise the answer may
        be QueueFileError, and EngineClosedError or EngineError are raised when nothing is taken any more.
        """
        task = _Task(work, then, answer or Future(), answer is not None, must)
        with self._changed:
            if self.closing and not must:
                raise EngineClosedError("the coordinator was closed")
            if self.failure is not None and not must:
                raise type(self.failure)(str(self.failure))
            self._inbox.append(task)
            self._changed.notify_all()
        return task.answer

    def close(self) -> None:
        with self._changed:
            self.closing = True
            self._changed.notify_all()

    def join(self) -> None:
        self._thread.join()

    # ---- the thread ----

    def _run(self) -> None:
        wait, tasks = 0.0, list[_Task]()
        try:
            while not self.closing:
                with self._changed:
                    self._changed.wait_for(lambda: self._inbox or self.closing, wait)
                tasks = self._take_inbox()
                wait = self._turn(tasks)
        except BaseException as error:  # a bug: everybody who waits must hear of it
            log.exception("the queue stopped")
            self.failure = EngineError(f"the queue stopped: {type(error).__name__}: {error}")
        self.close()
        self._turns.end()
        self._write_the_rest()
        self._store.close()
        cause = self.failure or EngineClosedError("the coordinator was closed")
        self._turns.failed(cause)
        for task in tasks:  # of the last turn; those that come later have been answered by failed()
            if not task.answer.done():
                refuse(task.answer, cause)

    def _take_inbox(self) -> list[_Task]:
        with self._changed:
            tasks = list(self._inbox)
            self._inbox.clear()
        return tasks

    def _turn(self, tasks: Sequence[_Task]) -> float:
        done: list[tuple[_Task, Any]] = []
        refused: list[tuple[_Task, RequestError]] = []
        try:
            with self._store.transaction():
                for task in tasks:
                    try:
                        done.append((task, task.work()))
                    except RequestError as error:
                        refused.append((task, error))
                result = self._turns.in_transaction()
        except QueueFileError as error:
            self._not_written(tasks, error)
            return _RETRY_S
        for task, value in done:
            try:
                answer = task.then(value)
            except RequestError as error:
                refused.append((task, error))
                continue
            if not task.later and task.answer.set_running_or_notify_cancel():
                task.answer.set_result(answer)
        for task, refusal in refused:
            refuse(task.answer, refusal)
        return self._turns.committed(result)

    def _not_written(self, tasks: Sequence[_Task], error: QueueFileError) -> None:
        """Nothing of it has happened. What must be written is tried again."""
        log.error("queue: %s", error)
        again = [task for task in tasks if task.must]
        with self._changed:
            self._inbox.extendleft(reversed(again))
        for task in tasks:
            if not task.must:
                refuse(task.answer, error)
        if again:
            with self._changed:
                self._changed.wait_for(lambda: self.closing, _RETRY_S)

    def _write_the_rest(self) -> None:
        while tasks := self._take_inbox():
            for task in tasks:
                if not task.must:
                    refuse(task.answer, self.failure or EngineClosedError("the coordinator was closed"))
            rest = [task for task in tasks if task.must]
            try:
                self._turn(rest)
            except Exception:
                log.exception("the queue could not be written to its end")
                return
            if rest and self._inbox and self._inbox[0] is rest[0]:  # in vain
                return


def refuse(answer: Future[Any], error: Exception) -> None:
    if answer.set_running_or_notify_cancel():
        answer.set_exception(error)
