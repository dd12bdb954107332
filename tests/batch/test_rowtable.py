"""The table of rows against a dict, and what it costs."""

from hypothesis import given
from hypothesis import strategies as st

from coremill.coordinator.batch.rowtable import IN_ERRORS, IN_RESULTS, SEEN, RowTable, line_key, row_key


@given(st.lists(st.tuples(st.integers(0, 40), st.binary(min_size=7, max_size=7), st.integers(0, 7)), max_size=200))
def test_behaves_like_a_dict(puts):
    table, model = RowTable(), {}
    for number, digest, flags in puts:
        # Keys that collide in segment and slot as often as possible.
        key = (number * 256 * 64).to_bytes(8, "little") + bytes(8)
        table.put(key, digest, flags)
        model[key] = (digest, flags)
        assert all(table.get(key) == value for key, value in model.items())
    assert len(table) == len(model)
    for wanted, without in ((0, 0), (SEEN, 0), (SEEN, IN_ERRORS), (IN_RESULTS | SEEN, 0), (0, SEEN | IN_RESULTS)):
        expected = sum(f & wanted == wanted and not f & without for _, f in model.values())
        assert table.count(wanted, without) == expected
    table.clear_flag(IN_ERRORS)
    assert all(table.get(key) == (digest, flags & ~IN_ERRORS) for key, (digest, flags) in model.items())


def test_unknown_rows():
    table = RowTable()
    assert table.get(row_key("a")) == (bytes(7), 0)
    table.put(row_key("a"), b"1234567", SEEN)
    assert table.get(row_key("b")) == (bytes(7), 0)


def test_at_most_64_bytes_a_row():
    table = RowTable()
    for i in range(200_000):
        table.put(row_key(f"row-{i}"), b"1234567", SEEN)
        if i > 20_000 and i % 5000 == 0:
            assert table.num_bytes <= 50 * len(table)


def test_keys_are_stable():
    # They are in the ids of result files: a later version must find the rows of an earlier one.
    assert row_key("a").hex() == "61c19307f3f0a7cb7c60cb842b79d830"
    assert line_key(7).hex() == "18d8910373ab9d4f3481b03a1a5945b2"
