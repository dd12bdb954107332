"""Block tables where a scheduler would not easily bring them."""

from __future__ import annotations

from coremill.coordinator.tables import Tables


def cached(tables: Tables, texts: list[list[int]]) -> None:
    """Sequences that have run side by side and are gone; what they computed is cached, the first of them oldest."""
    opened = [tables.open(tokens, tables.match(tokens), 1) for tokens in texts]
    for table, tokens in zip(opened, texts, strict=True):
        tables.acknowledge(table, tokens, len(tokens))
        tables.close(table, tokens)


def test_the_source_of_a_copy_is_not_handed_out_as_its_target():
    tables = Tables(6)
    first = list(range(10))
    cached(tables, [first, list(range(100, 110)), list(range(200, 210))])
    assert (tables.pool.num_free, tables.index.num_cached) == (3, 3)

    tokens = first + list(range(500, 600))
    match = tables.match(tokens)
    assert match.count == 10
    count = 4  # more than are free: the block to copy from, used longest ago, is evicted
    assert tables.num_needed(match, None, count) <= tables.num_available
    table = tables.open(tokens, match, count)
    assert table.copy.source not in table.blocks and table.copy.target == table.blocks[0]
    tables.check([table])

    source = table.copy.source
    tables.acknowledge(table, tokens, 10)  # the copy has been made
    assert table.copy is None and source in tables.take(tables.num_available)
