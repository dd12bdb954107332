"""map_frame: columns of pandas and Arrow in and out."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from coremill.config.errors import ConfigError, RequestError
from coremill.coordinator import AsyncCoordinator, Coordinator, Reject, Retry

pandas = pytest.importorskip("pandas")
arrow = pytest.importorskip("pyarrow")

TEXTS = ["a b", "c", "d e f", "g"]
OPTIONS = {"max_tokens": 6, "window": 3}


@pytest.fixture(scope="module")
def shared(tiny_pack):
    with Coordinator(tiny_pack, ctx=400) as coordinator:
        yield coordinator
        assert coordinator.drain(60)


@pytest.fixture(scope="module")
def expected(shared):
    return [result.text for result in shared.map(TEXTS, max_tokens=6)]


@pytest.fixture
def table():
    """With an index that is neither in order nor unique, and a column that is none of ours."""
    return pandas.DataFrame({"text": TEXTS, "other": [1, 2, 3, 4]}, index=[7, 3, 3, "x"])


def test_pandas_tables_keep_their_index_and_columns(shared, expected, table):
    before = table.copy()
    made = shared.map_frame(table, "text", into="out", **OPTIONS)
    assert list(made["out"]) == expected and list(made.columns) == ["text", "other", "out"]
    pandas.testing.assert_index_equal(made.index, table.index)
    pandas.testing.assert_frame_equal(table, before)
    pandas.testing.assert_frame_equal(made[["text", "other"]], before)


def test_columns_of_pandas(shared, expected, table):
    made = shared.map_frame(table["text"], into="out", **OPTIONS)
    assert list(made) == expected and made.name == "out"
    pandas.testing.assert_index_equal(made.index, table.index)
    made = shared.map_frame(table["text"], details=True, **OPTIONS)
    assert list(made["completion"]) == expected
    assert set(made["completion_finish_reason"]) <= {"stop", "length"}
    assert list(made["completion_prompt_tokens"]) == [shared.count_tokens(text) for text in TEXTS]
    assert max(made["completion_completion_tokens"]) <= 6


def test_arrow(shared, expected):
    table = arrow.table({"text": TEXTS, "other": [1, 2, 3, 4]}).replace_schema_metadata({"a": "b"})
    made = shared.map_frame(table, "text", into="out", **OPTIONS)
    assert made["out"].to_pylist() == expected and made.schema.metadata == {b"a": b"b"}
    assert made.select(["text", "other"]).equals(table)
    (batch,) = table.to_batches()
    made = shared.map_frame(batch, "text", into="out", **OPTIONS)
    assert isinstance(made, arrow.RecordBatch) and made.column("out").to_pylist() == expected
    for column in (
        arrow.array(TEXTS),
        arrow.chunked_array([TEXTS[:1], TEXTS[1:]]),
        arrow.array(TEXTS).dictionary_encode(),
    ):
        assert shared.map_frame(column, **OPTIONS).to_pylist() == expected
    assert shared.map_frame(arrow.array([], arrow.string())).to_pylist() == []


def test_cells_of_every_kind(shared):
    """As pandas and as Arrow have them."""
    messages = [{"role": "user", "content": "hello"}]
    as_texts = shared.map_frame(arrow.array(["hello"]), chat=True, **OPTIONS).to_pylist()
    assert shared.map_frame(arrow.array([messages]), **OPTIONS).to_pylist() == as_texts
    assert list(shared.map_frame(pandas.Series([messages]), **OPTIONS)) == as_texts
    ids = [[5, 6, 7], [8]]
    of_ids = [result.text for result in shared.map([{"prompt": each} for each in ids], max_tokens=6)]
    assert shared.map_frame(arrow.array(ids), **OPTIONS).to_pylist() == of_ids
    assert list(shared.map_frame(pandas.Series(arrow.array(ids).to_pandas()), **OPTIONS)) == of_ids
    rows = [{"prompt": "a", "max_tokens": 2, "custom_id": "x"}]
    (own,) = shared.map_frame(pandas.Series(rows), details=True, **OPTIONS)["completion_completion_tokens"]
    assert own <= 2


def test_rows_that_fail(shared, expected, table):
    table["text"] = ["a b", None, "xq" * 400, "g"]
    with pytest.raises(RequestError):
        shared.map_frame(table, "text", **OPTIONS)
    made = shared.map_frame(table, "text", into="out", errors="column", **OPTIONS)
    assert made["out"].isna().tolist() == made["out_error"].notna().tolist() == [False, True, True, False]
    assert [made["out"].iloc[0], made["out"].iloc[3]] == [expected[0], expected[3]]
    assert "'text' of row 2 is missing" in made["out_error"].iloc[1]
    assert made["out_error"].iloc[2].startswith("context_length_exceeded: ")
    made = shared.map_frame(arrow.array(["a", None]), errors="column", **OPTIONS)
    assert made.column_names == ["completion", "completion_error"] and made["completion"].to_pylist()[1] is None
    with pytest.raises(RequestError, match="the cell of row 1 is missing"):
        shared.map_frame(pandas.Series([float("nan")]))


def test_hooks_make_the_column(shared, table):
    tries: list[int] = []

    def hook(result):
        tries.append(result.index)
        if result.index == 1:
            raise Reject("not good")
        if result.index == 2 and tries.count(2) == 1:
            raise Retry("again")
        return len(result.text)

    made = shared.map_frame(table, "text", into="length", hook=hook, errors="column", **OPTIONS)
    assert made["length"].isna().tolist() == [False, True, False, False]
    assert "was rejected: not good" in made["length_error"].iloc[1] and tries.count(2) == 2

    def broken(result):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shared.map_frame(table, "text", hook=broken, **OPTIONS)


def test_awaited(shared, expected, table):
    async def hook(result):
        await asyncio.sleep(0)
        return result.text

    made = asyncio.run(AsyncCoordinator.over(shared).map_frame(table, "text", hook=hook, **OPTIONS))
    assert list(made["completion"]) == expected


def test_arguments_are_checked(shared, table):
    for wrong in ([1, 2], {"text": ["a"]}, "text", None):
        with pytest.raises(TypeError, match="frame is a"):
            shared.map_frame(wrong, "text")
    twice = pandas.concat([table["text"], table["text"]], axis=1)
    for frame, options in [
        (table, {}), (table, {"column": "nope"}), (table, {"column": "text", "into": "other"}),
        (twice, {"column": "text"}), (table["text"], {"column": "text"}), (table, {"column": "text", "errors": "no"}),
        (arrow.table(table.reset_index(drop=True)), {"column": "nope"}),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=r"(column|into|errors) is "):
            shared.map_frame(frame, **options)


def test_neither_library_is_loaded_by_us():
    code = "import sys; from coremill.coordinator import Coordinator; print({'pandas', 'pyarrow'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
