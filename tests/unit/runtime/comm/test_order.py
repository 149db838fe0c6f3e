"""The canonical tree: its shape, and that every way of pre-adding gives the one expression."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloader.errors import InternalError
from runtime.comm.order import children, cover, is_leaf, root

EXPRESSIONS = {
    1: "0",
    2: "(0+1)",
    3: "((0+1)+2)",
    5: "(((0+1)+(2+3))+4)",
    6: "(((0+1)+(2+3))+(4+5))",
    8: "(((0+1)+(2+3))+((4+5)+(6+7)))",
}


def all_nodes(node):
    return [node] if is_leaf(node) else [node, *(n for child in children(node) for n in all_nodes(child))]


def add(a, b):
    return f"({a}+{b})"


def tree_sum(node, parts):
    """The parts of `node`, added in tree order."""
    return parts[node] if node in parts else add(*(tree_sum(child, parts) for child in children(node)))


def leaves(ranks):
    return {(rank, rank + 1): str(rank) for rank in range(ranks)}


@pytest.mark.parametrize(("ranks", "expression"), EXPRESSIONS.items())
def test_the_tree_is_the_documented_one(ranks, expression):
    assert tree_sum(root(ranks), leaves(ranks)) == expression


@given(st.integers(1, 40), st.data())
@settings(max_examples=150, deadline=None)
def test_any_map_of_ranks_to_workers_gives_the_same_sum(ranks, data):
    workers = data.draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks))
    parts = {}
    for worker in set(workers):
        held = {rank for rank, w in enumerate(workers) if w == worker}
        nodes = cover(held, ranks)
        assert sorted(rank for node in nodes for rank in range(*node)) == sorted(held)
        parts |= {node: tree_sum(node, leaves(ranks)) for node in nodes}
    assert tree_sum(root(ranks), parts) == tree_sum(root(ranks), leaves(ranks))


@given(st.integers(1, 40), st.data())
@settings(max_examples=150, deadline=None)
def test_a_cover_is_made_of_the_largest_subtrees(ranks, data):
    held = data.draw(st.sets(st.integers(0, ranks - 1)))
    nodes = cover(held, ranks)
    assert list(nodes) == sorted(nodes)
    assert set(nodes) <= set(all_nodes(root(ranks)))
    siblings = [children(node) for node in all_nodes(root(ranks)) if not is_leaf(node)]
    assert not any(left in nodes and right in nodes for left, right in siblings)


@pytest.mark.parametrize("ranks", range(1, 34))
def test_children_tile_their_node(ranks):
    for node in all_nodes(root(ranks)):
        if not is_leaf(node):
            pair = children(node)
            assert pair[0][0] == node[0]
            assert pair[0][1] == pair[1][0]
            assert pair[1][1] == node[1]


def test_what_cannot_be_is_refused():
    with pytest.raises(InternalError, match="no children"):
        children((3, 4))
