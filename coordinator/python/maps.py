"""map and map_frame: many requests with one call."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from coremill.coordinator.python.asking import defaults_of
from coremill.coordinator.python.feeders import check_choices, check_rows, feed_by_thread
from coremill.coordinator.python.flow import Errors, Flow
from coremill.coordinator.python.frames import FrameErrors, FrameMap, FrameT, text_of
from coremill.coordinator.python.results import Hook, Results

if TYPE_CHECKING:
    from coremill.coordinator.python.backend import Backend
    from coremill.coordinator.python.sync import Coordinator


class Maps:
    """The part of Coordinator that maps."""

    _backend: Backend
    _check_owner: Callable[[], None]

    def map(
        self,
        rows: Iterable[Any] | AsyncIterable[Any],
        *,
        ordered: bool = True,
        window: int | None = None,
        hook: Hook | None = None,
        retries: int = 2,
        errors: Errors = "raise",
        chat: bool = False,
        system: str | None = None,
        any_model: bool = False,
        **fields: Any,
    ) -> Results:
        """Run many requests and iterate over their results; the input may be endless.

            for result in c.map(texts, system="Answer yes or no.", max_tokens=3, temperature=0):
                print(result.row, result.text)

        Args:
            rows: each a text, or a mapping as a line of a batch file is (`prompt` or `messages`, any sampling field,
                `custom_id`, `metadata`) that may also have `priority`, `timeout`, `deadline`, `retries`. A row without
                custom_id is "line-N", N from 1, so that the results are those of `coremill run` on the same rows.
                Read on a thread of its own, so that results come while it is slow.
            ordered: give results in the order of the rows; False: as they end.
            window: most rows taken from the input whose results have not been given yet; default 2048 in order, 256
                else, and no less than four times what runs at once.
            hook: called with each Result in the thread that iterates. What it returns is the result's `value`; it may
                raise Reject(reason) or Retry(reason, **fields). Anything else that it raises reaches the caller.
            retries: how often a row is run again, when the hook asks for it or after a failure that need not recur.
            errors: "raise" raises the RequestError of a row that failed, when its turn comes; going on afterwards is
                possible. "return" gives a Failure in its place.
            chat, system: texts are messages of a user, behind this system message if there is one.
            any_model: accept whatever `model` rows name.
            fields: for rows that do not say: max_tokens, temperature, top_p, top_k, min_p, seed, stop, priority,
                timeout (of each row, from its submission), deadline.

        What the input raises is raised after the results of the rows before it. The coordinator stays usable in any
        case; rows under way are cancelled when the iteration is given up (see Results).
        """
        flow = self._new_flow(rows, ordered, window, retries, errors, any_model, chat, system, fields)
        feed_by_thread(flow, rows)
        return Results(flow, hook, errors)

    def map_frame(
        self,
        frame: FrameT,
        column: Any = None,
        *,
        into: str = "completion",
        details: bool = False,
        errors: FrameErrors = "raise",
        window: int | None = None,
        hook: Hook | None = None,
        retries: int = 2,
        chat: bool = False,
        system: str | None = None,
        **fields: Any,
    ) -> FrameT:
        """Complete a column of prompts and return the frame with its new columns; index and order are kept.

            frame = c.map_frame(frame, "review", into="label", system="Positive or negative?", temperature=0)

        Args:
            frame: a DataFrame or Series of pandas, or a Table, RecordBatch, Array or ChunkedArray of Arrow. It is not
                changed. Of a single column in comes a single one out, or a table where there are more.
            column: its prompts: texts, lists of messages, lists of token ids, or mappings as in map().
            into: name of the new column, of texts or of what the hook returns.
            details: also make into_finish_reason, into_prompt_tokens and into_completion_tokens.
            errors: "raise" raises the RequestError of the first row that fails, a missing cell among them; "column"
                makes into_error, with None for rows that did not.
            others: as in map().
        """
        frames = FrameMap(frame, column, into, errors, details)
        hook = hook or text_of
        with self.map(
            frames.rows(), ordered=False, window=window, hook=hook, retries=retries, errors="return", chat=chat,
            system=system, **fields,
        ) as results:  # fmt: skip
            for outcome in results:
                frames.take(outcome)
        return frames.frame()

    def _new_flow(
        self, rows: Any, ordered: bool, window: int | None, retries: int, errors: str, any_model: bool,
        chat: bool, system: str | None, fields: dict[str, Any],
    ) -> Flow:  # fmt: skip
        self._check_owner()
        check_rows(rows)
        check_choices(window, errors)
        models = None if any_model else lambda: self._backend.model_names
        defaults = defaults_of({**fields, "retries": retries}, chat, system, models)
        default_window = max(2048 if ordered else 256, 4 * self._backend.num_slots)
        return Flow(cast("Coordinator", self), defaults, window or default_window, ordered, retries)
