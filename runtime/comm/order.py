"""The canonical tree over logical ranks: the one order in which gradients are added.

A node is a range [low, high) of logical ranks. It splits at low + the largest power of two below its size, so
[0, 8) is a full binary tree and [0, 5) is [0, 4) with [4, 5). Addition in floating point isn't associative;
as every sum in a job follows this tree, the result doesn't depend on who computed, held or pre-added what.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dataloader.errors import InternalError
from runtime.protocol import Node


def root(ranks: int) -> Node:
    """The node of a whole job with so many logical ranks."""
    return (0, ranks)


def is_leaf(node: Node) -> bool:
    return node[1] - node[0] == 1


def children(node: Node) -> tuple[Node, Node]:
    """The two halves of a node of at least two ranks."""
    low, high = node
    if high - low < 2:
        raise InternalError(f"node {node} of the reduction tree has no children")
    middle = low + (1 << ((high - low - 1).bit_length() - 1))
    return (low, middle), (middle, high)


def cover(held: Collection[int], ranks: int) -> tuple[Node, ...]:
    """The largest whole subtrees inside a set of logical ranks, ascending, in the tree over `ranks` ranks."""
    members = frozenset(held)

    def within(node: Node) -> Iterable[Node]:
        inside = sum(1 for r in members if node[0] <= r < node[1])
        if inside == node[1] - node[0]:
            return [node]
        if inside == 0:
            return []
        left, right = children(node)
        return [*within(left), *within(right)]

    return tuple(within(root(ranks)))
