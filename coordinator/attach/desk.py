"""What a resident coordinator answers to attached clients, on its local socket.

hello        {version}                    what it is: durable, model names, fingerprint, ...
submit       {jobs}                       each {id, kept, watched, request, options}; all or none
job          {id}                         follow a kept job: its request and options
news         {}                           what has happened to the jobs that the client follows, once there is something
watch        {id}                         its text too, from the beginning
cancel_job   {id}
acknowledge  {ids}
claim        {reader, limit}              outcomes of kept jobs for a reader, once there is one
unclaim      {reader}                     not any more: the claim is answered with none, unless it has been answered
release      {reader}                     others get what it has not acknowledged
count        {requests}, render {requests}     texts
ready        {}                           whether all workers have loaded
stats        {}
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from coremill.config.errors import EngineError, RequestError
from coremill.config.joboptions import JobOptions
from coremill.config.request import GenerationRequest
from coremill.config.request_fields import check_bool, check_int, check_text, invalid
from coremill.coordinator.attach import VERSION
from coremill.coordinator.attach.session import Seat, Session
from coremill.coordinator.local_socket.wire import error_fields
from coremill.coordinator.python.kept import check_id
from coremill.coordinator.queue.errand import Errand, Follower, Runner, hand_over
from coremill.coordinator.queue.forms import options_of, request_of
from coremill.coordinator.queue.rules import Order
from coremill.coordinator.queue.store import Row
from coremill.coordinator.text.requests import TextRequest

if TYPE_CHECKING:
    from coremill.coordinator.local_socket import LocalServer
    from coremill.coordinator.queue.backend import QueueBackend

Fields = dict[str, Any]
_MAX_JOBS, _MAX_CLAIM = 10_000, 1000


class Desk:
    """Clients of a backend.

    desk = Desk(backend, "smollm2")
    server = LocalServer("up", "smollm2", desk.handlers, desk.leave)
    desk.serve(server)
    """

    def __init__(self, backend: QueueBackend, model: str) -> None:
        self._backend, self._model = backend, model
        self._runner: Runner = backend.local
        self._serving: Future[LocalServer] = Future()
        self._sessions: dict[bytes, Session] = {}
        self._slow = ThreadPoolExecutor(1, "coremill-desk")  # what asks the workers
        self.handlers: dict[str, Callable[[Fields], Any]] = {
            "hello": self._hello, "submit": self._submit, "job": self._job, "news": lambda _: self._session.ask(),
            "watch": self._watch, "cancel_job": self._cancel, "acknowledge": self._acknowledge, "claim": self._claim,
            "unclaim": self._unclaim, "release": self._release, "count": self._count, "render": self._render,
            "ready": lambda _: backend.wait_ready(0), "stats": lambda _: self._slow.submit(backend.stats),
        }  # fmt: skip

    def serve(self, server: LocalServer) -> None:
        self._serving.set_result(server)

    def stats(self) -> dict[str, int]:
        return {"clients": len(self._sessions)}

    def close(self) -> None:
        """After the server's close()."""
        for client in list(self._sessions):
            self.leave(client)
        self._slow.shutdown(wait=False, cancel_futures=True)

    def leave(self, client: bytes) -> None:
        """It is gone. Its kept jobs go on; nobody could ever ask for the others."""
        session = self._sessions.pop(client, None)
        if session is None:
            return
        with session.lock:
            session.gone = True
            seats, session.seats = session.seats, {}
        self._unseat(seats.values())
        for reader in list(session.readers):
            self._forget_reader(session, reader)

    @property
    def _session(self) -> Session:
        """Of the client whose call is being answered."""
        session = self._sessions.get(self._serving.result().caller)
        if session is None:
            raise RequestError("invalid_call", "the first call must be 'hello'")
        return session

    # ---- calls ----

    def _hello(self, fields: Fields) -> Fields:
        server = self._serving.result()  # the first client may come before serve()
        version = fields.get("version")
        if version != VERSION:
            raise EngineError(
                f"the coordinator attaches clients of version {VERSION}, not {version!r}: use one coremill"
            )
        client = server.caller
        if client not in self._sessions:
            self._sessions[client] = Session(client)
            server.watch(client)
        return {
            "pid": os.getpid(),
            "model": self._model,
            "durable": self._backend.is_durable,
            "fingerprint": self._backend.fingerprint,
            "num_slots": self._backend.num_slots,
            "model_names": sorted(self._backend.model_names),
        }

    def _submit(self, fields: Fields) -> Future[Any]:
        session = self._session
        orders: list[Order] = []
        guests: list[Errand] = []
        seats: list[Seat] = []
        for form in _list(fields, "jobs", _MAX_JOBS):
            if not isinstance(form, dict):
                raise invalid("jobs", form, "a list of objects")
            id = check_id(form.get("id"))
            request, options = request_of(form.get("request")), options_of(form.get("options"))
            kept, watched = check_bool(form.get("kept"), "kept"), check_bool(form.get("watched"), "watched")
            known = id in session.seats
            if known and not kept:
                raise RequestError("id_in_use", f"job {id!r} is not kept, and submitted twice", "id")
            if not known:
                seats.append(Seat(session, id, watched))
            if kept:
                orders.append(Order(id, request, options, None if known else seats[-1]))
            else:
                guests.append(_guest(seats[-1], request, options))
        answer: Future[Any] = Future()
        accepted = self._backend.keeper.submit(orders) if orders else _done([])

        def begin(accepted: Future[list[bool]]) -> None:
            error = accepted.exception()
            if error is not None:
                answer.set_exception(error)
                return
            self._seat(session, seats)
            answer.set_result(accepted.result())
            for seat in seats:
                seat.open()
            hand_over(self._runner, guests)

        accepted.add_done_callback(begin)
        return answer

    def _job(self, fields: Fields) -> Future[Any]:
        session, id = self._session, check_id(fields.get("id"))
        answer: Future[Any] = Future()

        def asked(row: Row) -> Follower:
            form = {"request": json.loads(row.request or ""), "options": json.loads(row.options or "")}
            seat = session.seats.get(id)
            if seat is None:
                seat = Seat(session, id, False)
                self._seat(session, [seat])
            followed.append((seat, form))
            return seat

        def said(done: Future[Follower]) -> None:
            error = done.exception()
            if error is not None:
                answer.set_exception(error)
                return
            ((seat, form),) = followed
            answer.set_result(form)
            seat.open()

        followed: list[tuple[Seat, Fields]] = []
        self._backend.keeper.follow(id, asked).add_done_callback(said)
        return answer

    def _seat(self, session: Session, seats: Sequence[Seat]) -> None:
        with session.lock:
            session.seats.update((seat.id, seat) for seat in seats)
            gone = session.gone
        if gone:  # meanwhile
            self._unseat(seats)

    def _unseat(self, seats: Iterable[Seat]) -> None:
        for seat in seats:
            if seat.errand is None:
                self._backend.keeper.unfollow(seat.id, seat)
            elif seat.errand.end():
                self._runner.cancel(seat.errand)

    def _watch(self, fields: Fields) -> None:
        seat = self._session.seats.get(check_id(fields.get("id")))
        if seat is None:  # it has ended
            return
        seat.watched = True
        if seat.errand is None:
            self._backend.keeper.watch(seat.id, seat)
        elif seat.errand.watch(seat):
            self._runner.watch(seat.errand)

    def _cancel(self, fields: Fields) -> Future[None] | None:
        session, id = self._session, check_id(fields.get("id"))
        seat = session.seats.get(id)
        if seat is None or seat.errand is None:
            return self._backend.keeper.cancel(id)
        with session.lock:
            session.seats.pop(id, None)
        self._unseat([seat])
        return None

    def _acknowledge(self, fields: Fields) -> Future[None]:
        return self._backend.keeper.acknowledge([check_id(id) for id in _list(fields, "ids", 1 << 20)])

    # ---- readers ----

    def _claim(self, fields: Fields) -> Future[list[Fields]]:
        session, reader = self._session, check_text(fields.get("reader"), "reader", max_chars=64)
        limit = check_int(fields.get("limit"), "limit", 1, _MAX_CLAIM)
        if session.readers.get(reader) is not None:
            raise RequestError("invalid_call", f"reader {reader!r} has a claim already", "reader")
        answer: Future[list[Fields]] = Future()
        claimed = self._backend.keeper.claim(_name(session, reader), limit)
        session.readers[reader] = claimed

        def said(claimed: Future[list[Row]]) -> None:
            session.readers[reader] = None
            if claimed.cancelled():
                answer.set_result([])
            elif (error := claimed.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result([self._claimed_form(row) for row in claimed.result()])

        claimed.add_done_callback(said)
        return answer

    def _claimed_form(self, row: Row) -> Fields:
        try:
            request, options, outcome = (json.loads(text or "") for text in (row.request, row.options, row.outcome))
        except ValueError as error:
            return {"id": row.id, "failure": error_fields(self._backend.keeper.damaged(row, error))}
        return {"id": row.id, "request": request, "options": options, "outcome": outcome}

    def _unclaim(self, fields: Fields) -> None:
        claimed = self._session.readers.get(check_text(fields.get("reader"), "reader", max_chars=64))
        if claimed is not None:  # what is there now is given first
            self._backend.keeper.caught_up().add_done_callback(lambda _: claimed.cancel())

    def _release(self, fields: Fields) -> None:
        self._forget_reader(self._session, check_text(fields.get("reader"), "reader", max_chars=64))

    def _forget_reader(self, session: Session, reader: str) -> None:
        if reader in session.readers:
            claimed = session.readers.pop(reader)
            if claimed is not None:
                claimed.cancel()
            self._backend.keeper.release(_name(session, reader))

    # ---- texts ----

    def _count(self, fields: Fields) -> Future[list[Any]]:
        return _plain(self._backend.count_tokens(_texts(fields)))

    def _render(self, fields: Fields) -> Future[list[Any]]:
        return _plain(self._backend.render(_texts(fields)))


def _guest(seat: Seat, request: GenerationRequest, options: JobOptions) -> Errand:
    """A job that is not kept: it is the client's alone."""
    seat.errand = errand = Errand(0, seat.id, request, options, lambda _, outcome: seat.finish(outcome))
    if seat.watched:
        errand.watch(seat)
    return errand


def _name(session: Session, reader: str) -> str:
    return f"{session.client.hex()}/{reader}"


def _list(fields: Fields, name: str, limit: int) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list) or len(value) > limit:
        raise invalid(name, value, f"a list of at most {limit}")
    return value


def _texts(fields: Fields) -> list[TextRequest]:
    """Of forms of requests, which says what may be in them."""
    ask = check_bool(fields.get("add_generation_prompt"), "add_generation_prompt")
    requests = [request_of(form) for form in _list(fields, "requests", _MAX_JOBS)]
    return [
        TextRequest(request.messages, request.prompt, add_generation_prompt=ask, allow_special=request.allow_special)
        for request in requests
    ]


def _plain(asked: Future[list[Any]]) -> Future[list[Any]]:
    """Errors among the answers as fields."""
    answer: Future[list[Any]] = Future()

    def said(asked: Future[list[Any]]) -> None:
        if (error := asked.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result([error_fields(one) if isinstance(one, Exception) else one for one in asked.result()])

    asked.add_done_callback(said)
    return answer


def _done(value: Any) -> Future[Any]:
    made: Future[Any] = Future()
    made.set_result(value)
    return made
