"""Block tables, and the books of all blocks.

    table    |== nodes ==|== growing ==|........|      one block id per 32 positions
             |=========done=========|                  tokens acknowledged as computed
             shared, never written    private: of this table alone

A table belongs to a sequence and outlives its leases: whoever runs the sequence next gets the table and goes on at
`done`. Each block is in one of five places:

    free --> private --> shared <--> cached --> free         (lingering: free as soon as a copy of it has been made)
                `---------------------------------^
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coremill.config.arena import BLOCK_TOKENS
from coremill.coordinator.blocks import BlockPool
from coremill.coordinator.prefix import MIN_COPY, Match, Node, PrefixIndex

NEVER = 1 << 62


class Copy(NamedTuple):
    """The first `count` tokens of block `source` belong into block `target` before anything is computed there."""

    source: int
    target: int
    count: int


@dataclass(eq=False, slots=True)
class Table:
    """The blocks of one sequence.

    nodes: of its first blocks, all held by it. Block i is nodes[i].block, or private when equal content was
    computed twice. growing: nodes of the next blocks, its own, still to be filled.
    copy: what the next worker to run it must do first, until it has acknowledged that.
    waiters: heap of (tokens, number, who) to be woken when that many are done.
    notable: with as many tokens done there is something to do.
    """

    blocks: list[int]
    nodes: list[Node] = field(default_factory=list)
    growing: list[Node] = field(default_factory=list)
    done: int = 0
    copy: Copy | None = None
    waiters: list[tuple[int, int, Any]] = field(default_factory=list)
    notable: int = NEVER

    @property
    def computed(self) -> int:
        """Where a worker goes on."""
        return self.done + self.copy.count if self.copy else self.done

    @property
    def parent(self) -> Node | None:
        """The node of the last block that has one."""
        return self.nodes[-1] if self.nodes else None

    @property
    def computed_twice(self) -> list[int]:
        """Private blocks whose content the index has in another block."""
        return [block for block, node in zip(self.blocks, self.nodes, strict=False) if block != node.block]

    @property
    def private(self) -> list[int]:
        return self.computed_twice + self.blocks[len(self.nodes) :]


class Tables:
    """Opens, grows, shares and closes tables. sharing: False keeps every block private and caches nothing.

    Methods that may end somebody's waiting return those who waited.
    """

    def __init__(self, num_blocks: int, sharing: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(self.pool)
        self.sharing = sharing
        self._most_used = 0
        self._num_waiters = 0

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out, at least: a cached block may turn out to be pinned."""
        return max(0, self.pool.num_free + self.index.num_cached - self.pool.num_pinned)

    def match(self, tokens: Sequence[int], table: Table | None = None) -> Match:
        """What the index has for a sequence, beyond what its table holds."""
        if not self.sharing:
            return Match(list(table.nodes) if table else [])
        return self.index.match(tokens, table.nodes, table.computed) if table else self.index.match(tokens)

    def num_needed(self, match: Match, table: Table | None, count: int) -> int:
        """Available blocks that opening or resuming a table of `count` blocks takes."""
        held = len(table.nodes) if table else 0
        have = max(len(match.nodes), len(table.blocks) if table else 0)
        cached = sum(not node.refs for node in match.nodes[held:])
        return max(0, count - have) + cached + (match.count > 0)

    def open(self, tokens: Sequence[int], match: Match, count: int, table: Table | None = None) -> Table:
        """A table of at least `count` blocks that begins with what was matched; `table` is the present one, if any.

        What of `tokens` must still be computed is announced to others.
        """
        table = table or Table([])
        for node in match.nodes[len(table.nodes) :]:
            self.index.hold(node)
            table.nodes.append(node)
        shared = len(match.nodes)
        if BLOCK_TOKENS * shared > table.computed:
            self.cancel_copy(table)
            table.done = BLOCK_TOKENS * shared
        if match.count:  # before anything is evicted: it must not come back as a block to write to
            self.pool.pin(match.source)
        self.pool.give_back(table.computed_twice)  # no worker has the table now
        table.blocks[:shared] = [node.block for node in table.nodes]
        if len(table.blocks) < count:
            table.blocks += self.take(count - len(table.blocks))
        if match.count:
            table.copy = Copy(match.source, table.blocks[shared], match.count)
        if self.sharing:
            self._announce(table, tokens)
        return table

    def _announce(self, table: Table, tokens: Sequence[int]) -> None:
        parent = table.parent or self.index.root
        for index in range(len(table.nodes), len(table.blocks)):
            key = tuple(tokens[BLOCK_TOKENS * index : BLOCK_TOKENS * (index + 1)])
            if len(key) < MIN_COPY or key in parent.children:
                break
            parent = self.index.insert(parent, key, table.blocks[index], table)
            table.growing.append(parent)
            if len(key) < BLOCK_TOKENS:
                break
        self._note(table)

    def take(self, count: int) -> list[int]:
        """`count` blocks, evicting cached ones as needed. As long as little is cached, memory that was never
        used comes first; the rest of the arena is left untouched."""
        pool, index = self.pool, self.index
        used = pool.num_blocks - pool.num_free - index.num_cached + count
        self._most_used = max(self._most_used, used)
        most_cached = max(self._most_used, pool.num_blocks // 8)
        taken = []
        for _ in range(count):
            while index.num_cached and (not pool.num_free or (index.num_cached > most_cached and not pool.has_touched)):
                index.evict()
            taken += pool.take(1)
        return taken

    def grow(self, table: Table, count: int) -> list[int]:
        """`count` blocks more at the end."""
        taken = self.take(count)
        table.blocks += taken
        return taken

    # ---- as tokens are computed ----

    def acknowledge(self, table: Table, tokens: Sequence[int], computed: int) -> list[Any]:
        """The first `computed` of `tokens` are in its blocks. Needed only at `notable` and beyond; before that,
        setting `done` says the same."""
        self.cancel_copy(table)
        table.done = computed
        if self.sharing:
            while BLOCK_TOKENS * (len(table.nodes) + 1) <= computed:
                self._complete(table, tokens)
        woken = []
        while table.waiters and table.waiters[0][0] <= computed:
            woken.append(heapq.heappop(table.waiters)[2])
        self._note(table)
        return woken

    def _complete(self, table: Table, tokens: Sequence[int]) -> None:
        """Its first block without a node is full: others may use it from now on."""
        at = len(table.nodes)
        parent = table.parent or self.index.root
        key = tuple(tokens[BLOCK_TOKENS * at : BLOCK_TOKENS * (at + 1)])
        node = table.growing.pop(0) if table.growing else None
        if node is not None and node.tokens == key:
            node.owner, node.refs = None, 1
        else:
            if node is not None:  # the end of a prompt, which has gone on since
                self.index.remove(node)
            node = parent.children.get(key)
            if node is not None and node.owner is not None:  # another computes the same, and we were faster
                self._withdraw(node.owner, node)
                node = None
            if node is None:
                node = self.index.insert(parent, key, table.blocks[at], None)
            else:
                self.index.hold(node)
        table.nodes.append(node)

    def _withdraw(self, table: Table, first: Node) -> None:
        """Its growing nodes from `first` on are not announced any more."""
        at = table.growing.index(first)
        for node in reversed(table.growing[at:]):
            self.index.remove(node)
        del table.growing[at:]

    def _note(self, table: Table) -> None:
        """Find out when there is something to do next."""
        notable = BLOCK_TOKENS * (len(table.nodes) + 1) if self.sharing else NEVER
        if table.waiters:
            notable = min(notable, table.waiters[0][0])
        table.notable = 0 if table.copy else notable

    def wait(self, table: Table, needed: int, who: Any) -> None:
        """Have `who` returned by whatever makes `needed` tokens of the table done, or impossible."""
        self._num_waiters += 1
        heapq.heappush(table.waiters, (needed, self._num_waiters, who))
        self._note(table)

    # ---- ends ----

    def pause(self, table: Table) -> list[Any]:
        """Nobody runs it any more, so nobody should wait for it. It keeps its blocks."""
        if table.growing:
            self._withdraw(table, table.growing[0])
        woken = [who for _, _, who in table.waiters]
        table.waiters.clear()
        self._note(table)
        return woken

    def shrink(self, table: Table, count: int) -> int:
        """Give up the last blocks of a paused table until `count` have become available; how many have. What was in
        them must be found again or computed again."""
        before = self.num_available
        while table.blocks and self.num_available - before < count:
            self.cancel_copy(table)
            block = table.blocks.pop()
            node = table.nodes.pop() if len(table.nodes) > len(table.blocks) else None
            if node is None or node.block != block:
                self.pool.give_back((block,))
            if node is not None:
                self.index.drop(node)
            table.done = min(table.done, BLOCK_TOKENS * len(table.blocks))
        self._note(table)
        return self.num_available - before

    def close(self, table: Table, tokens: Sequence[int]) -> list[Any]:
        """Nobody will use the table again. What it has computed of `tokens` stays in the index as long as there is
        room."""
        woken = self.pause(table)
        self.cancel_copy(table)
        private = table.private
        if self.sharing:
            self._keep_rest(table, tokens, private)
        for node in reversed(table.nodes):
            self.index.drop(node)
        self.pool.give_back(private)
        table.blocks, table.nodes = [], []
        return woken

    def _keep_rest(self, table: Table, tokens: Sequence[int], private: list[int]) -> None:
        """The last block, when it is worth it: a chat goes on in the middle of it."""
        begin = BLOCK_TOKENS * len(table.nodes)
        key = tuple(tokens[begin : table.done])
        if len(key) < MIN_COPY:
            return
        parent = table.parent or self.index.root
        if parent.nearest(key)[1] == len(key):  # somebody else has as much
            return
        block = table.blocks[len(table.nodes)]
        private.remove(block)
        self.index.drop(self.index.insert(parent, key, block, None))

    def cancel_copy(self, table: Table) -> None:
        """It has been made, or will not be; what it brings is not in `done`."""
        if table.copy is not None:
            self.pool.unpin(table.copy.source)
            table.copy = None

    # ---- the books ----

    def counts(self, tables: Iterable[Table]) -> dict[str, int]:
        """Blocks by where they are; lingering ones count as private."""
        cached, free = self.index.num_cached, self.pool.num_free
        shared = len({node.block for table in tables for node in table.nodes})
        rest = self.pool.num_blocks - free - cached - shared
        return {"free": free, "cached": cached, "shared": shared, "private": rest}

    def check(self, tables: Iterable[Table]) -> None:
        """AssertionError unless every block is in exactly one place and every node is counted right."""
        tables = list(tables)
        nodes = list(self.index)
        held: dict[Node, int] = {}
        for table in tables:
            assert table.done >= BLOCK_TOKENS * len(table.nodes), "a node before its tokens"
            assert table.done <= BLOCK_TOKENS * len(table.blocks), "tokens without blocks"
            for node in table.nodes:
                held[node] = held.get(node, 0) + 1
            assert all(node.owner is table for node in table.growing), "growing in two places"
            at = len(table.nodes)
            assert [node.block for node in table.growing] == table.blocks[at : at + len(table.growing)]
        complete = [node for node in nodes if node.owner is None]
        assert all(node.refs == held.get(node, 0) for node in complete), "nodes are miscounted"
        assert held.keys() <= set(complete), "a table holds a node that cannot be found"
        assert self.index.num_cached == sum(not node.refs for node in complete), "cached blocks are miscounted"
        growing = sum(len(table.growing) for table in tables)
        assert len(nodes) - len(complete) == growing, "a growing node has no table"
        self.pool.check([[node.block for node in complete], *(table.private for table in tables)])
        pins = {table.copy.source for table in tables if table.copy}
        assert self.pool.num_pinned == len(pins), "a block is pinned for nobody"
