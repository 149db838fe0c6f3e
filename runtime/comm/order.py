"""The canonical tree over logical ranks: the one order in which gradients are added.

A node is a range [low, high) of logical ranks. It splits at low + the largest power of two below its size, so
[0, 8) is a full binary tree and [0, 5) is [0, 4) with [4, 5). Addition in floating point isn't associative;
as every sum in a job follows this tree, the result doesn't depend on who computed, held or pre-added what.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from dataloader.errors import InternalError
from runtime.protocol import Node

T = TypeVar("T")


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


def family(node: Node, ranks: int) -> tuple[Node, Node] | None:
    """The two siblings, in order, of which `node` is one; None for the root. Their union is the parent."""
    here = root(ranks)
    while here != node:
        left, right = children(here)
        if node in (left, right):
            return left, right
        here = left if node[1] <= left[1] else right
    return None


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


def tree_sum(node: Node, parts: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
    """Add the parts of `node` in tree order. InternalError if they don't make it up."""
    part = parts.get(node)
    if part is not None:
        return part
    if is_leaf(node):
        raise InternalError(f"no gradient for logical rank {node[0]}")
    left, right = children(node)
    return add(tree_sum(left, parts, add), tree_sum(right, parts, add))
