"""The prefix index: which block of the arena holds the keys and values of which tokens, after which others.

    root --32 tokens--> node --32 tokens--> node --9 tokens--> node          a node is one block

    a node is   owner   refs   its block belongs to         others may
    growing     table   0      that table                   wait for it; copy what is acknowledged of it
    shared      None    > 0    every table that holds it    hold it (when it has 32 tokens), copy any part of it
    cached      None    0      nobody                       the same; it is evicted when blocks are short

Content decides, not history: equal tokens from position 0 give equal bytes, whoever computed them. The root stands for
the model, the pack, the KV type and the numerics, which are constant while an engine lives.

When blocks are short, cached leaves go in this order: those that no waiting sequence begins with, least recently used
first; then the others, likewise. So a batch run, whose window waits here, loses a prefix with its last row rather than
one that rows still to come share.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from coremill.config.arena import BLOCK_TOKENS
from coremill.coordinator.blocks import BlockPool

if TYPE_CHECKING:
    from coremill.coordinator.tables import Table

# Fewer tokens than this are computed rather than copied.
MIN_COPY = 4
# Fewer tokens than this are not waited for while another sequence computes them.
MIN_WAIT = 8

Tokens = tuple[int, ...]


class Node:
    """One block. tokens: what it holds, 1 to 32; keys: its children's tokens, sorted."""

    __slots__ = ("block", "children", "keys", "last_use", "owner", "parent", "refs", "tokens")

    def __init__(self, parent: Node | None, tokens: Tokens, block: int, owner: Table | None = None) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block = block
        self.owner = owner
        self.refs = 0
        self.last_use = 0
        self.children: dict[Tokens, Node] = {}
        self.keys: list[Tokens] = []

    def nearest(self, tokens: Tokens) -> tuple[Node | None, int]:
        """(child, length) of the longest common beginning of `tokens` and a child. Neighbours in order have it."""
        at = bisect_left(self.keys, tokens)
        best, longest = None, 0
        for key in self.keys[max(at - 1, 0) : at + 1]:
            length = common_length(key, tokens)
            if length > longest:
                best, longest = self.children[key], length
        return best, longest

    def path(self) -> Tokens:
        """All tokens from position 0 to its last."""
        parts, node = [], self
        while node.parent is not None:
            parts.append(node.tokens)
            node = node.parent
        return tuple(chain.from_iterable(reversed(parts)))

    def readable(self, position: int) -> tuple[int, int]:
        """(tokens, block): how many of its tokens can be copied now, and from where. position: of its first token."""
        if self.owner is None:
            return len(self.tokens), self.block
        copy = self.owner.copy
        if copy is not None and copy.target == self.block:  # not made yet for all we know, so read where it reads
            return copy.count, copy.source
        return max(0, self.owner.done - position), self.block


@dataclass(slots=True)
class Match:
    """What the index has of some tokens.

    nodes: full blocks, from position 0. count tokens more can be copied from block `source` (count 0: none).
    wait: a table that is computing more of them; worth waiting until it has `needed` tokens.
    """

    nodes: list[Node] = field(default_factory=list)
    source: int = -1
    count: int = 0
    wait: Table | None = None
    needed: int = 0


class _Leaves:
    """Cached leaves, least recently used first: a heap of (last use, block, node) that may hold outdated entries."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []

    def push(self, node: Node, num_cached: int) -> None:
        heapq.heappush(self._heap, (node.last_use, node.block, node))
        if len(self._heap) > 2 * num_cached + 64:
            self._heap = [entry for entry in self._heap if _is_leaf(entry)]
            heapq.heapify(self._heap)

    def peek(self) -> Node | None:
        while self._heap and not _is_leaf(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Node | None:
        node = self.peek()
        if node is not None:
            heapq.heappop(self._heap)
        return node


def _is_leaf(entry: tuple[int, int, Node]) -> bool:
    """Whether the entry still tells the truth."""
    used, _, node = entry
    return node.last_use == used and not (node.refs or node.children)


class PrefixIndex:
    """The tree, and the order in which cached blocks go.

    is_wanted: whether a sequence that waits begins with these tokens and goes on.
    """

    def __init__(self, pool: BlockPool, is_wanted: Callable[[Tokens], bool] = lambda tokens: False) -> None:
        self.root = Node(None, (), -1)
        self.num_cached = 0
        self.num_evicted = 0
        self.is_wanted = is_wanted
        self._pool = pool
        self._clock = 0
        self._leaves, self._wanted = _Leaves(), _Leaves()

    def match(self, tokens: Sequence[int], known: Sequence[Node] = (), done: int = 0) -> Match:
        """What others have computed, or are computing, of `tokens` but the last, which must be computed for its logits.

        known: nodes that are held already; done: tokens that need not be found, so that only whole blocks help.
        """
        limit = len(tokens) - 1
        match = Match(list(known))
        node, position = match.nodes[-1] if known else self.root, BLOCK_TOKENS * len(known)
        while position + BLOCK_TOKENS <= limit:
            child = node.children.get(tuple(tokens[position : position + BLOCK_TOKENS]))
            if child is None or child.owner is not None:
                break
            match.nodes.append(child)
            node, position = child, position + BLOCK_TOKENS
        deepest, end = node, position
        while end + BLOCK_TOKENS <= limit:
            child = deepest.children.get(tuple(tokens[end : end + BLOCK_TOKENS]))
            if child is None:
                break
            deepest, end = child, end + BLOCK_TOKENS
        near, common = deepest.nearest(tuple(tokens[end : min(end + BLOCK_TOKENS, limit)]))
        if deepest is not node:
            more = common if near is not None and near.owner is deepest.owner and common >= MIN_WAIT else 0
            match.wait, match.needed = deepest.owner, end + more
        elif near is not None and done <= position:
            self._match_part(match, near, common, position)
        return match

    @staticmethod
    def _match_part(match: Match, near: Node, common: int, position: int) -> None:
        count, source = near.readable(position)
        if common - count >= MIN_WAIT:
            match.wait, match.needed = near.owner, position + common
        elif min(count, common) >= MIN_COPY:
            match.source, match.count = source, min(count, common)

    # ---- nodes ----

    def insert(self, parent: Node, tokens: Tokens, block: int, owner: Table | None) -> Node:
        """A node that is growing (with an owner) or held by whoever asks."""
        node = Node(parent, tokens, block, owner)
        node.refs = 1 if owner is None else 0
        parent.children[tokens] = node
        insort(parent.keys, tokens)
        return node

    def remove(self, node: Node) -> None:
        """Its tokens are not found any more."""
        parent = node.parent
        del parent.children[node.tokens]
        del parent.keys[bisect_left(parent.keys, node.tokens)]

    def hold(self, node: Node) -> None:
        if not node.refs:
            self.num_cached -= 1
        node.refs += 1

    def drop(self, node: Node) -> None:
        """One holder less; without any it is cached."""
        node.refs -= 1
        if not node.refs:
            self.num_cached += 1
            self._clock += 1
            node.last_use = self._clock
            self._offer(node)

    def evict(self) -> None:
        """Give a cached leaf's block back to the pool."""
        node = self._victim()
        node.last_use = -1
        self.remove(node)
        self.num_cached -= 1
        self.num_evicted += 1
        self._pool.give_back((node.block,))
        parent = node.parent
        if parent is not self.root and not parent.refs and parent.owner is None:
            self._offer(parent)

    def _victim(self) -> Node:
        """Who is wanted is found out here, and set aside; the first of these is asked again each time."""
        oldest = self._wanted.peek()
        if oldest is not None and not self.is_wanted(oldest.path()):
            return self._wanted.pop()
        while (node := self._leaves.pop()) is not None:
            if not self.is_wanted(node.path()):
                return node
            self._wanted.push(node, self.num_cached)
        return self._wanted.pop()

    def _offer(self, node: Node) -> None:
        if not node.children:
            self._leaves.push(node, self.num_cached)

    def __iter__(self) -> Iterator[Node]:
        """Every node, parents first."""
        open_nodes = [self.root]
        while open_nodes:
            node = open_nodes.pop()
            yield from node.children.values()
            open_nodes += node.children.values()


def common_length(one: Sequence[int], two: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = 0
    for left, right in zip(one, two, strict=False):
        if left != right:
            break
        length += 1
    return length
