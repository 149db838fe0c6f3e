"""Who holds which shard, and who runs which logical rank: pure, deterministic, byte-saving.

A shard has an owner and one backup. All choices lower one cost, so they can't go round in circles:

    64 x (sum of shards owned squared + sum of copies held squared)   even load, in traffic and in memory
    + sum over (owner, backup) pairs of their shards squared          one worker's shards are backed by many others
    + 1,000,000 per shard with both copies on one of several nodes

Among complete copies a choice costs no byte, so it is made at once. A copy elsewhere costs one shard's state: it is
begun by naming a second backup to be filled (a *move*), only where it lowers the cost by 64 or more, and a later plan,
when all three are complete, retires the copy that became superfluous (rule 16).

*Carriers* are about to leave: nothing is placed on them in the end, but until enough of those who stay have been filled
they hold what they have, as owners where nobody else can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import permutations
from typing import TypeAlias

from runtime.protocol import ShardPlan, WorkerId

LOAD, ONE_NODE = 64, 1_000_000
Pair: TypeAlias = tuple[WorkerId, WorkerId]  # owner, backup


def spread(pieces: int, workers: Sequence[WorkerId]) -> tuple[WorkerId, ...]:
    """Pieces in equal contiguous blocks, in the order of the workers."""
    return tuple(workers[piece * len(workers) // pieces] for piece in range(pieces))


def place_shards(
    workers: Sequence[WorkerId],
    nodes: Mapping[WorkerId, int],
    complete: Sequence[set[WorkerId]],
    before: Sequence[ShardPlan] | None,
    carriers: Set[WorkerId] = frozenset(),
) -> tuple[ShardPlan, ...]:
    """One ``ShardPlan`` per shard. ``complete[s]``: who has a complete copy of shard s (never empty)."""
    there = [copies.intersection(workers) for copies in complete]
    if len(workers) == 1:
        placed = tuple(ShardPlan(workers[0], (), () if copies else (workers[0],)) for copies in there)
    else:
        placement = _Placement(workers, nodes, there, before)
        placement.fill()
        placement.improve()
        placed = placement.plans() if carriers else placement.with_moves()
    if not carriers:
        return placed
    return tuple(
        carried(placed[shard], there[shard], carriers & complete[shard], before[shard] if before else None)
        for shard in range(len(placed))
    )


def carried(wanted: ShardPlan, there: Set[WorkerId], carriers: Set[WorkerId], before: ShardPlan | None) -> ShardPlan:
    """The same with those who leave in the roles that nobody who stays can fill yet."""
    named = (wanted.owner, *wanted.backups)
    if not carriers or (len(named) > 1 and there >= set(named)):
        return wanted
    first, *rest = sorted(carriers, key=lambda w: (before is None or w != before.owner, w))
    if wanted.owner in there:
        return ShardPlan(wanted.owner, (first, *wanted.backups), wanted.fill)
    return ShardPlan(first, (*rest[:1], *named), named)


class _Placement:
    def __init__(
        self,
        workers: Sequence[WorkerId],
        nodes: Mapping[WorkerId, int],
        complete: Sequence[set[WorkerId]],
        before: Sequence[ShardPlan] | None,
    ) -> None:
        self.workers, self.nodes, self.complete = workers, nodes, complete
        self.several_nodes = len({nodes[w] for w in workers}) > 1
        self.owned: Counter[WorkerId] = Counter()
        self.held: Counter[WorkerId] = Counter()
        self.together: Counter[Pair] = Counter()
        self.pairs: dict[int, Pair] = {}  # shards with two copies named
        self.alone: dict[int, WorkerId] = {}  # shards whose backup is still to be found
        self.adrift: list[int] = []  # shards that only carriers have
        wanted = [s.owner for s in before] if before is not None else list(spread(len(complete), workers))
        for shard, copies in enumerate(complete):
            if not copies:
                self.adrift.append(shard)
                continue
            self.begin(shard, copies, wanted[shard], before[shard].backups if before is not None else ())

    def begin(self, shard: int, copies: set[WorkerId], owner: WorkerId, backups: tuple[WorkerId, ...]) -> None:
        """As before, as far as the copies live; else as is cheapest."""
        if len(copies) == 1:
            (self.alone[shard],) = copies
            self.count((self.alone[shard],), +1)
            return
        choices = [pair for pair in permutations(sorted(copies), 2) if owner not in copies or pair[0] == owner]
        kept = [pair for pair in choices if pair[1] in backups]
        self.name(shard, min(kept or choices, key=self.cost_of))

    # --- the cost ---------------------------------------------------------------------------------------------

    def cost_of(self, pair: Pair) -> int:
        """What one more shard on this pair adds to the cost."""
        owner, backup = pair
        cost = LOAD * (2 * self.owned[owner] + 2 * self.held[owner] + 2 * self.held[backup] + 3)
        one_node = self.several_nodes and self.nodes[owner] == self.nodes[backup]
        return cost + 2 * self.together[pair] + 1 + ONE_NODE * one_node

    def count(self, where: tuple[WorkerId] | Pair, sign: int) -> None:
        self.owned[where[0]] += sign
        for worker in where:
            self.held[worker] += sign
        if len(where) == 2:
            self.together[where] += sign

    def name(self, shard: int, pair: Pair) -> None:
        if shard in self.pairs:
            self.count(self.pairs[shard], -1)
        self.pairs[shard] = pair
        self.count(pair, +1)

    # --- choices ------------------------------------------------------------------------------------------------

    def better(self, shard: int, choices: Iterable[Pair], by: int = 1) -> Pair | None:
        """The cheapest of these pairs, if it is cheaper than the shard's own by so much."""
        own = self.pairs[shard]
        self.count(own, -1)
        best = min(choices, key=lambda pair: (self.cost_of(pair), pair), default=own)
        gain = self.cost_of(own) - self.cost_of(best)
        self.count(own, +1)
        return best if gain >= by else None

    def improve(self) -> None:
        """Choose among complete copies until no single choice is cheaper. Every change lowers the cost."""
        improved = True
        while improved:
            improved = False
            for shard, own in self.pairs.items():
                if own[1] in self.complete[shard]:
                    choices = list(permutations(sorted(self.complete[shard]), 2))
                elif not self.complete[shard]:
                    choices = list(permutations(self.workers, 2))
                else:  # the only complete copy owns it; anybody may be filled
                    choices = [(own[0], w) for w in self.workers if w != own[0]]
                if (pair := self.better(shard, choices)) is not None:
                    self.name(shard, pair)
                    improved = True

    def fill(self) -> None:
        """A backup for every shard that has but one copy, and both for one that has none here."""
        for shard, owner in sorted(self.alone.items()):
            self.count((owner,), -1)
            choices = [(owner, w) for w in self.workers if w != owner]
            self.name(shard, min(choices, key=lambda pair: (self.cost_of(pair), pair)))
        self.alone.clear()
        for shard in self.adrift:
            self.name(shard, min(permutations(self.workers, 2), key=lambda pair: (self.cost_of(pair), pair)))

    def plans(self) -> tuple[ShardPlan, ...]:
        return tuple(self.plan(shard, self.pairs[shard], None) for shard in range(len(self.pairs)))

    def with_moves(self) -> tuple[ShardPlan, ...]:
        """The plan of what is named now, and a second backup where a copy is worth moving: one move per shard."""
        named = dict(self.pairs)
        moves: dict[int, WorkerId] = {}
        settled = False
        while not settled:
            settled = True
            for shard, (owner, backup) in named.items():
                if shard in moves or backup not in self.complete[shard]:
                    continue
                others = [w for w in self.workers if w not in self.complete[shard]]
                choices = [pair for w in others for pair in ((owner, w), (w, backup), (w, owner), (backup, w))]
                if (pair := self.better(shard, choices, by=LOAD)) is not None:
                    (moves[shard],) = set(pair) - {owner, backup}
                    self.name(shard, pair)
                    settled = False
        return tuple(self.plan(shard, named[shard], moves.get(shard)) for shard in range(len(named)))

    def plan(self, shard: int, pair: Pair, second: WorkerId | None) -> ShardPlan:
        owner, backup = pair
        backups = (backup,) if second is None else (backup, second)
        return ShardPlan(owner, backups, tuple(w for w in backups if w not in self.complete[shard]))
