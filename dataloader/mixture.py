"""Which source a sample comes from, as arithmetic: an integer-exact schedule without memory or state.

The sources of one set of weights are the leaves of a binary tree. A node with the weights w and v below it gives, of
its first n samples, round(n w / (w + v)) to the left and the rest to the right. Both only ever grow by one, so sample
number n of a node goes left if the left's count grows with it, and that count is its number there: from the root down,
(source, number in that source) of any sample takes as many steps as the leaf is deep.

A split is off by half a sample at most, and hands its own node's error down by the share of the child. So source i is
off from its exact share of any prefix by at most

    1/2 (1 + sum over the nodes between its leaf and the root of weight_i / weight_node)

The tree is chosen to make the largest of these small, which is below 1 for all but a few mixtures; `Mixture.bound` has
it. No rule by which every source grows by one at a time, and which looks the same from any place on, can always stay
below 1 (Balinski and Young, Fair Representation, 1982: there about seats).

Weights are taken as the decimal numbers that were written, so 0.1 is a tenth, and nothing is ever rounded to nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dataloader.errors import ConfigError

Integers: TypeAlias = NDArray[np.int64]
EXACT = 8  # leaves up to which every tree is looked at
_FITS_INT64 = 2**30  # total weight up to which the arithmetic stays within 63 bits


@dataclass(frozen=True, slots=True)
class Leaf:
    source: int
    weight: int


@dataclass(frozen=True, slots=True)
class Split:
    left: Tree
    right: Tree

    @property
    def weight(self) -> int:
        return self.left.weight + self.right.weight


Tree: TypeAlias = Leaf | Split


def whole_weights(weights: Sequence[float], names: Sequence[str]) -> tuple[int, ...]:
    """The smallest integers in the same proportions. ConfigError for a weight that is none, or if all are 0."""
    exact = []
    for name, weight in zip(names, weights, strict=True):
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"data.sources.{name}.weight: {weight} is no share; give a number of 0 or more")
        exact.append(Fraction(str(weight)))
    if not any(exact):
        raise ConfigError("data.sources: every weight is 0, so there is nothing to read; give one a weight")
    scale = math.lcm(*(f.denominator for f in exact))
    whole = [int(f * scale) for f in exact]
    common = math.gcd(*whole)
    return tuple(w // common for w in whole)


class Mixture:
    """The schedule of one set of integer weights. A source of weight 0 is never read.

    bound   no source is ever off from its exact share of a prefix by this many samples, or more
    """

    def __init__(self, weights: Sequence[int]) -> None:
        leaves = [Leaf(source, weight) for source, weight in enumerate(weights) if weight > 0]
        if not leaves or any(weight < 0 for weight in weights):
            raise ValueError(f"weights {tuple(weights)}: none is negative, and one is positive")
        self.weights, self.total = tuple(weights), sum(weights)
        self._tree = best_tree(leaves)
        self.bound = bound_of(self._tree)
        self._dtype: Any = np.int64 if self.total <= _FITS_INT64 else object

    def at(self, samples: Integers) -> tuple[Integers, Integers]:
        """(source, number in that source) of each sample of the schedule; int64 [n] each, of int64 [n] from 0 on."""
        sources, numbers = np.empty(len(samples), np.int64), np.empty(len(samples), np.int64)
        waiting = [(self._tree, np.arange(len(samples)), np.asarray(samples).astype(self._dtype))]
        while waiting:
            node, places, own = waiting.pop()
            if isinstance(node, Leaf):
                sources[places], numbers[places] = node.source, own.astype(np.int64)
            elif len(places):
                before = to_the_left(node, own)
                left = to_the_left(node, own + 1) > before
                waiting.append((node.left, places[left], before[left]))
                waiting.append((node.right, places[~left], (own - before)[~left]))
        return sources, numbers

    def counts(self, samples: int) -> tuple[int, ...]:
        """How many of the first so many samples come from each source."""
        counts = [0] * len(self.weights)
        waiting = [(self._tree, samples)]
        while waiting:
            node, own = waiting.pop()
            if isinstance(node, Leaf):
                counts[node.source] = own
            else:
                left = to_the_left(node, own)
                waiting += [(node.left, left), (node.right, own - left)]
        return tuple(counts)

    def reaches(self, source: int, number: int) -> int:
        """The least number of samples of which so many come from this source. ValueError if it is never read."""
        weight = self.weights[source]
        if weight == 0:
            raise ValueError(f"source {source} has weight 0")
        low, high = 0, (number + 2 + len(self.weights)) * self.total // weight + 1
        while low < high:
            middle = (low + high) // 2
            if self.counts(middle)[source] >= number:
                high = middle
            else:
                low = middle + 1
        return low


def to_the_left(node: Split, own: Any) -> Any:
    """Of the node's first `own` samples: round(own x share), halves up. In steps that fit 63 bits up to _FITS_INT64."""
    left, total = node.left.weight, node.weight
    whole, rest = own // total, own % total
    return whole * left + (2 * rest * left + total) // (2 * total)


# --- trees --------------------------------------------------------------------------------------------------------


def bound_of(tree: Tree) -> float:
    """See the module; but a split whose shares have the denominator d is off by floor(d / 2) / d only."""
    worst = Fraction(0)
    waiting: list[tuple[Tree, Fraction]] = [(tree, Fraction(0))]
    while waiting:
        node, off = waiting.pop()  # off: by how much its own count may be, as a share of its weight
        if isinstance(node, Leaf):
            worst = max(worst, off * node.weight)
            continue
        denominator = node.weight // math.gcd(node.left.weight, node.weight)
        split = Fraction(denominator // 2, denominator)
        waiting += [(child, off + split / child.weight) for child in (node.left, node.right)]
    return float(worst)


def best_tree(leaves: Sequence[Leaf]) -> Tree:
    """Of all trees the best, for a few leaves; else a good one."""
    if len(leaves) == 1:
        return leaves[0]
    build = of_all if len(leaves) <= EXACT else by_slack
    return min((build(leaves, 0.5 + n / 24.0) for n in range(24)), key=bound_of)


def of_all(leaves: Sequence[Leaf], allowed: float) -> Tree:
    """The tree with the most slack (see `by_slack`), by what every set of leaves can have at best."""
    count = len(leaves)
    best: list[tuple[float, Tree]] = [(0.0, leaves[0])] * (1 << count)
    for chosen in range(1, 1 << count):
        if chosen & (chosen - 1) == 0:
            leaf = leaves[chosen.bit_length() - 1]
            best[chosen] = allowed / leaf.weight, leaf
            continue
        parts, part = (-math.inf, 0), (chosen - 1) & chosen
        while part > chosen ^ part:  # each pair once
            parts = max(parts, (min(best[part][0], best[chosen ^ part][0]), part))
            part = (part - 1) & chosen
        node = Split(best[parts[1]][1], best[chosen ^ parts[1]][1])
        best[chosen] = parts[0] - 1.0 / node.weight, node
    return best[-1][1]


def by_slack(leaves: Sequence[Leaf], allowed: float) -> Tree:
    """Put together, again and again, the two that can best afford another node above them.

    The sum over the nodes above a leaf of 1 / weight may come to allowed / weight of the leaf; what is left is slack.
    """
    heap: list[tuple[float, int, Tree]] = [(-allowed / leaf.weight, n, leaf) for n, leaf in enumerate(leaves)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 2:
        (_, _, a), (slack, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        node = Split(a, b)
        heapq.heappush(heap, (slack + 1.0 / node.weight, number, node))
        number += 1
    return Split(heap[0][2], heap[1][2])
