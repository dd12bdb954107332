"""The files of a run: OUT, its error file and OUT.journal. Opened, locked, repaired, appended to, synced.

A line that is in a file stays there whole: each file only grows by whole lines, a write that fails half-way is cut
back, and what a crash tore is cut off when the next run opens the file.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import stat
import threading
from collections.abc import Sequence
from typing import Any

from coremill.config.errors import RunError
from coremill.coordinator.batch.appendfile import IRREGULAR, AppendFile
from coremill.coordinator.batch.journal import (
    check_fingerprint,
    header_line,
    is_torn,
    load_digests,
    read_header,
    record_line,
)
from coremill.coordinator.batch.results import LINE_START, Record, row_of_line
from coremill.coordinator.batch.rowtable import IN_ERRORS, IN_RESULTS, UNKNOWN_DIGEST, RowTable
from coremill.coordinator.batch.slowly import Slowly, Stage
from coremill.coordinator.batch.waiting import WaitingRows

SYNC_SECONDS = 1.0
_PACKED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz", ".zip")


def default_errors_path(out: str) -> str:
    """OUT with `.jsonl` replaced by `.errors.jsonl`, or with that added when OUT ends otherwise."""
    return out.removesuffix(".jsonl") + ".errors.jsonl"


class ResultFiles:
    """Opens the three files for one run and brings `table` up to what they hold.

    Args:
        out, errors: paths. input_identity: (device, inode) of the input, which must be neither.
        stats: another file that is going to be written and must be none of these.
        tell: told of progress when reading what is there takes long.
        fingerprint: what results depend on; compared with the earlier run's when there are finished rows.
        table: gets IN_RESULTS, IN_ERRORS and the digests of finished rows.
    Attributes:
        repaired: files whose last line a crash had torn, which was cut off.
        waited: rows by key that an earlier run finished and held back; they need only be written.
        started: when the first of the runs that made these files began, which is the time templates are told.
    Raises RunError, ResumeRefusedError. Nothing an earlier run finished is changed by opening.
    """

    def __init__(
        self,
        out: str,
        errors: str | None,
        fingerprint: dict[str, Any],
        table: RowTable,
        *,
        input_identity: tuple[int, int] | None = None,
        stats: str | None = None,
        tell: Stage | None = None,
    ) -> None:
        self._table = table
        self._tell = tell
        self._errors_path = errors or default_errors_path(out)
        self._input_identity = input_identity
        self._open: list[AppendFile] = []
        self.repaired: list[str] = []
        paths = {"OUT": out, "the error file": self._errors_path, "the journal": out + ".journal"}
        paths["the file of rows that wait"] = out + ".waiting"
        self._waiting = WaitingRows(out + ".waiting", fingerprint)
        _check_paths(paths | ({} if stats is None else {"--stats": stats}), input_identity)
        try:
            self._journal = self._open_file(out + ".journal")
            self._out = self._open_file(out)
            # Created with its first row: a run without failures leaves no empty file behind.
            self._errors = self._open_file(self._errors_path) if os.path.exists(self._errors_path) else None
            self._resume(fingerprint)
            _sync_folder(out)
        except BaseException:
            self._remove_created()
            self._close_files()
            raise
        self._syncer = _Syncer(self._open)
        self._written = False

    def __enter__(self) -> ResultFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes. A run that failed says its own reason, and leaves no file behind that it made and never wrote to."""
        if kind is None:
            self.close()
            return
        self._syncer.stop()
        if self._written:
            self._syncer.sync()
        else:
            self._remove_created()
        self._close_files()

    def write(self, records: Sequence[Record]) -> None:
        """Appends finished rows: once this returns they survive the death of any process."""
        self._syncer.check()
        self._written = True
        self._journal.append(b"".join(record_line(record.key, record.digest) for record in records))
        if results := b"".join(record.line for record in records if not record.failed):
            self._out.append(results)
        if failures := b"".join(record.line for record in records if record.failed):
            if self._errors is None:
                self._errors = self._open_file(self._errors_path)
                _sync_folder(self._errors_path)
            self._errors.append(failures)
        self._waiting.forget(record.key for record in records)

    def hold(self, records: Sequence[Record]) -> None:
        """Finished rows that are to be written later: once this returns they, too, survive the death of any process."""
        self._syncer.check()
        self._waiting.keep(records)

    def forget_waited(self) -> None:
        """Rows that waited are not in the input any more."""
        self._waiting.forget(self.waited)
        self.waited = {}

    def forget_errors(self) -> None:
        """Failed rows are to run again: empties the error file. From then on they count as not yet run, so a
        run that dies right here loses none of them."""
        if self._errors is not None:
            self._errors.cut(0)
        self._table.clear_flag(IN_ERRORS)
        self._waiting.forget([key for key, record in self.waited.items() if record.failed])
        self.waited = {key: record for key, record in self.waited.items() if not record.failed}

    def close(self) -> None:
        """Syncs and closes. RunError when the disk refuses; the files are closed even then."""
        try:
            self._syncer.stop()
            self._syncer.sync()
            self._syncer.check()
        finally:
            self._close_files()

    def _open_file(self, path: str) -> AppendFile:
        file = AppendFile(path, identity_refused=self._input_identity)
        self._open.append(file)
        return file

    def _remove_created(self) -> None:
        for file in self._open:
            if file.created:
                with contextlib.suppress(RunError, OSError):  # not ours any more, or not to be removed
                    file.check()
                    os.unlink(file.path)

    def _close_files(self) -> None:
        self._waiting.close()
        for file in self._open:
            file.close()
        self._open.clear()

    def _resume(self, fingerprint: dict[str, Any]) -> None:
        """Nothing is cut before everything is known to be ours."""
        num_results, out_end = self._scan(self._out, IN_RESULTS)
        num_errors, errors_end = self._scan(self._errors, IN_ERRORS) if self._errors else (0, 0)
        with os.fdopen(os.dup(self._journal.fd), "rb") as file:
            file.seek(0)
            first = file.readline(1 << 20)
        header = read_header(first, self._journal.path)
        errors_name = os.path.relpath(self._errors_path, os.path.dirname(self._out.path) or ".")
        holder = next((file.path for file in (self._out, self._errors) if file and file.size), None)
        if header is None and holder is not None:
            raise RunError(
                f"{holder} exists and {self._journal.path} does not tell from which run: choose another name"
            )
        if num_results + num_errors:
            check_fingerprint(self._out.path, header["fingerprint"], fingerprint)
        self._check_earlier_errors(header, errors_name)
        self._cut_torn(self._out, out_end)
        if self._errors is not None:
            self._cut_torn(self._errors, errors_end)
        self.waited = self._waiting.load(lambda key: self._table.get(key)[1])
        if header is None or num_results + num_errors + len(self.waited) == 0:
            self.started = datetime.datetime.now().replace(microsecond=0)
            self._journal.cut(0)
            self._journal.append(header_line(fingerprint, errors_name, self.started))
            self._journal.sync()
            return
        self.started = header["started"]
        self._cut_torn(self._journal, load_digests(self._journal.fd, len(first), self._table))

    def _cut_torn(self, file: AppendFile, end: int) -> None:
        if end != file.size:
            self.repaired.append(file.path)
            file.cut(end)

    def _check_earlier_errors(self, header: dict[str, Any] | None, errors_name: str) -> None:
        earlier = header.get("errors") if header else None
        if not isinstance(earlier, str) or earlier == errors_name:
            return
        if self._errors is not None and self._errors.size:
            raise RunError(
                f"{self._errors_path} holds failed rows of another run than {self._out.path}: choose another"
            )
        path = os.path.join(os.path.dirname(self._out.path) or ".", earlier)
        if os.path.exists(path) and os.path.getsize(path):
            raise RunError(
                f"the earlier run wrote its failed rows to {path}: resume with --errors {path}, or move that file away"
            )

    def _scan(self, file: AppendFile, flag: int) -> tuple[int, int]:
        """Enters the rows of a file into the table; returns their number and where they end. RunError when there is
        anything else in it but the torn line of a crash at its end."""
        num_rows = end = 0
        stranger = "line {} of {} is not a result of coremill, or not a whole one: remove it or choose another name"
        slowly = Slowly("reading the results so far", self._tell)
        with open(os.dup(file.fd), "rb", buffering=1 << 20) as lines:
            lines.seek(0)
            for line in lines:
                slowly(end, file.size)
                if not line.endswith(b"\n"):
                    if not is_torn(line, LINE_START):
                        raise RunError(stranger.format(num_rows + 1, file.path))
                    break
                num_rows += 1
                end += len(line)
                row = row_of_line(line)
                if row is None:
                    raise RunError(stranger.format(num_rows, file.path))
                key, failed = row
                if failed != (flag == IN_ERRORS):
                    kind, place = ("a failed row", "OUT") if failed else ("a result", "the error file")
                    raise RunError(f"line {num_rows} of {file.path} is {kind}, so this is not {place}: choose another")
                if self._table.get(key)[1]:
                    raise RunError(f"line {num_rows} of {file.path} is about a row that has a line already: remove one")
                self._table.put(key, UNKNOWN_DIGEST, flag)
        return num_rows, end


class _Syncer:
    """Syncs files that were written to and looks whether they are still in place, once a second, on a thread of its
    own: a slow disk then delays no row."""

    def __init__(self, files: list[AppendFile]) -> None:
        self._files = files
        self._stopping = threading.Event()
        self._error: OSError | RunError | None = None
        self._thread = threading.Thread(target=self._run, name="coremill-sync", daemon=True)
        self._thread.start()

    def check(self) -> None:
        if isinstance(self._error, RunError):
            raise self._error
        if self._error is not None:
            raise RunError(f"cannot sync the results to disk: {self._error.strerror}") from self._error

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(SYNC_SECONDS):
            self.sync()

    def sync(self) -> None:
        try:
            # The journal is first in the list: its records reach the disk before the rows they describe.
            for file in tuple(self._files):
                file.sync()
            for file in tuple(self._files):
                file.check()
        except (OSError, RunError) as error:
            self._error = error


def _check_paths(paths: dict[str, str], input_identity: tuple[int, int] | None) -> None:
    """Refuses before anything is created: the input as output, one file in two roles."""
    roles: dict[Any, str] = {}
    for role, path in paths.items():
        if path == "-":
            raise RunError(f"{role} cannot be standard output: a run must be able to resume from it; give a file name")
        try:
            status = os.stat(path)
        except FileNotFoundError:
            identity: Any = os.path.realpath(path)
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror}") from None
        else:
            identity = (status.st_dev, status.st_ino)
            if not stat.S_ISREG(status.st_mode):
                raise RunError(IRREGULAR.format(path))
        if path.endswith(_PACKED_SUFFIXES):
            raise RunError(f"{role} ({path}) will be plain JSON lines: its name must not end like a packed file's")
        if identity == input_identity:
            raise RunError(f"{role} ({path}) is the input itself: choose another name")
        if identity in roles:
            raise RunError(f"{role} ({path}) is the same file as {roles[identity]}: choose another name")
        roles[identity] = role


def _sync_folder(path: str) -> None:
    """A file's name survives a power cut only once its folder is synced."""
    try:
        fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder one may write to but not list; the kernel will write its entry in time
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
