"""map_frame: a column of prompts in, columns of completions out. Knows pandas and Arrow by their objects, and imports
nothing of them that the caller has not."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from coremill.config.errors import ConfigError, RequestError
from coremill.coordinator.python.flow import Failure, Result

FrameT = TypeVar("FrameT")
FrameErrors = Literal["raise", "column"]
_DETAILS = ("finish_reason", "prompt_tokens", "completion_tokens")


class FrameMap:
    """One map_frame(). rows() goes into map(); take() each of its results, in any order; then frame() is the answer.

    TypeError for what is no frame, ConfigError for a column that is not there, or is already.
    """

    def __init__(self, frame: Any, column: Any, into: str, errors: FrameErrors, details: bool) -> None:
        if errors not in ("raise", "column"):
            raise ConfigError(f"errors is {errors!r}: it must be 'raise' or 'column'")
        self._frame, self._column, self._into = frame, column, into
        self._kind = _kind_of(frame)
        self._raises = errors == "raise"
        self._num_details = len(_DETAILS) if details else 0
        names = [*_DETAILS[: self._num_details], *([] if self._raises else ["error"])]
        self._names = [into, *(f"{into}_{name}" for name in names)]
        self._prompts = self._find(column)
        self._made: list[list[Any]] = [[None] * len(self._prompts) for _ in self._names]

    def _find(self, column: Any) -> Any:
        """The prompts."""
        if self._kind not in ("DataFrame", "Table", "RecordBatch"):
            if column is not None:
                raise ConfigError(f"column is {column!r}: a {self._kind} has no columns to choose from")
            return self._frame
        names = list(self._frame.columns) if self._kind == "DataFrame" else self._frame.schema.names
        known = ", ".join(map(repr, names)) or "none"
        if names.count(column) != 1:
            there = "several times in" if column in names else "not in"
            raise ConfigError(f"column is {column!r}, which is {there} the frame; its columns: {known}")
        for name in self._names:
            if name in names:
                raise ConfigError(f"into is {self._into!r}: the frame has a column {name!r} already")
        return self._frame[column]

    def rows(self) -> Iterator[Any]:
        """For map(). A cell is a text, messages, token ids, or a mapping of a request's fields."""
        for position, cell in enumerate(self._prompts):
            yield self._row(position, cell.as_py() if hasattr(cell, "as_py") else cell)

    def _row(self, position: int, cell: Any) -> Any:
        if _is_missing(cell):
            name = "the cell" if self._column is None else repr(self._column)
            return RequestError("invalid_value", f"{name} of row {position + 1} is missing: it must be a prompt")
        if isinstance(cell, (str, Mapping)) or not isinstance(cell, Iterable):
            return cell
        cells = list(cell)
        return {"messages" if cells and isinstance(cells[0], Mapping) else "prompt": cells}

    def take(self, outcome: Result | Failure) -> None:
        """RequestError of a row that failed, unless errors have a column."""
        made, at = self._made, outcome.index
        if isinstance(outcome, Failure):
            if self._raises:
                raise outcome.error
            made[-1][at] = f"{outcome.error.code}: {outcome.error.message}"
            return
        usage = outcome.usage
        made[0][at] = outcome.value
        details = (outcome.finish_reason, usage.prompt_tokens, usage.completion_tokens)
        for column, value in zip(made[1:], details[: self._num_details], strict=False):
            column[at] = value

    def frame(self) -> Any:
        """The frame with its new columns; of a single column, the new one, or all of them as a table."""
        if self._kind in ("DataFrame", "Series"):
            return self._pandas()
        return self._arrow()

    def _pandas(self) -> Any:
        pandas = sys.modules["pandas"]
        index = self._frame.index
        columns = {name: pandas.Series(made, index=index, name=name) for name, made in self._new()}
        if self._kind == "DataFrame":
            return self._frame.assign(**columns)
        return columns[self._into] if len(columns) == 1 else pandas.DataFrame(columns, index=index)

    def _arrow(self) -> Any:
        arrow = sys.modules["pyarrow"]
        arrays = [arrow.array(made, arrow.string() if _are_texts(made) else None) for _, made in self._new()]
        fields = [arrow.field(name, array.type) for name, array in zip(self._names, arrays, strict=True)]
        if self._kind == "Table":
            made = self._frame
            for field, array in zip(fields, arrays, strict=True):
                made = made.append_column(field, array)
            return made
        if self._kind == "RecordBatch":
            schema = self._frame.schema
            for field in fields:
                schema = schema.append(field)
            return arrow.RecordBatch.from_arrays([*self._frame.columns, *arrays], schema=schema)
        return arrays[0] if len(arrays) == 1 else arrow.Table.from_arrays(arrays, schema=arrow.schema(fields))

    def _new(self) -> Iterator[tuple[str, list[Any]]]:
        return zip(self._names, self._made, strict=True)


def text_of(result: Result) -> str:
    """The hook where there is none."""
    return result.text


def _kind_of(frame: Any) -> str:
    for kind in type(frame).__mro__:  # subclasses too
        if kind.__module__.partition(".")[0] in ("pandas", "pyarrow"):
            name = "Array" if kind.__name__.endswith("Array") and kind.__name__ != "ChunkedArray" else kind.__name__
            if name in ("DataFrame", "Series", "Table", "RecordBatch", "Array", "ChunkedArray"):
                return name
    raise TypeError(f"frame is a {type(frame).__name__}: it must be a table or a column of pandas or Arrow")


def _is_missing(cell: Any) -> bool:
    """None, NaN, NaT, NA."""
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(cell, float) and cell != cell


def _are_texts(values: Sequence[Any]) -> bool:
    return all(value is None or isinstance(value, str) for value in values)
