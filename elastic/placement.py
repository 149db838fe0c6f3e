"""Who holds which shard, and who runs which logical rank: pure, deterministic, byte-saving.

A shard has an owner and one backup, on different nodes where there are two. While it *moves*, a second backup is
being filled; the copy that becomes superfluous is retired by a later plan, when all three are complete (rule 16).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from runtime.protocol import ShardPlan, WorkerId


def spread(pieces: int, workers: Sequence[WorkerId]) -> tuple[WorkerId, ...]:
    """Pieces in equal contiguous blocks, in the order of the workers."""
    return tuple(workers[piece * len(workers) // pieces] for piece in range(pieces))


def place_shards(
    workers: Sequence[WorkerId],
    nodes: Mapping[WorkerId, int],
    complete: Sequence[set[WorkerId]],
    before: Sequence[ShardPlan] | None,
) -> tuple[ShardPlan, ...]:
    """One ``ShardPlan`` per shard. ``complete[s]``: who has a complete copy of shard s (never empty)."""
    owners = choose_owners(workers, complete, before)
    return _Backups(workers, nodes, complete, before, owners).plans()


def choose_owners(
    workers: Sequence[WorkerId], complete: Sequence[set[WorkerId]], before: Sequence[ShardPlan] | None
) -> list[WorkerId]:
    """An owner stays if it can; an orphan goes to the least loaded copy; then ownership is evened out among copies."""
    wanted = [s.owner for s in before] if before is not None else list(spread(len(complete), workers))
    load: Counter[WorkerId] = Counter(dict.fromkeys(workers, 0))
    load.update(w for s, w in enumerate(wanted) if w in complete[s])
    owners = []
    for shard, copies in enumerate(complete):
        owner = wanted[shard]
        if owner not in copies:
            owner = min(copies, key=lambda w: (load[w], w))
            load[owner] += 1
        owners.append(owner)
    moved = True
    while moved:
        moved = False
        for shard, copies in enumerate(complete):
            lightest = min(copies, key=lambda w: (load[w], w))
            if load[owners[shard]] - load[lightest] >= 2:
                load[owners[shard]] -= 1
                load[lightest] += 1
                owners[shard] = lightest
                moved = True
    return owners


class _Backups:
    """Backups for given owners; ``held`` counts the copies each worker will hold once all moves are over."""

    def __init__(
        self,
        workers: Sequence[WorkerId],
        nodes: Mapping[WorkerId, int],
        complete: Sequence[set[WorkerId]],
        before: Sequence[ShardPlan] | None,
        owners: list[WorkerId],
    ) -> None:
        self.workers, self.nodes, self.complete, self.before, self.owners = (
            workers,
            nodes,
            complete,
            before,
            owners,
        )
        self.several_nodes = len({nodes[w] for w in workers}) > 1
        self.held: Counter[WorkerId] = Counter(dict.fromkeys(workers, 0))
        self.held.update(owners)
        self.pairs: Counter[tuple[WorkerId, WorkerId]] = Counter()  # (owner, backup): spread one owner over many
        self.backups: list[list[WorkerId]] = []

    def plans(self) -> tuple[ShardPlan, ...]:
        if len(self.workers) == 1:
            return tuple(ShardPlan(owner, ()) for owner in self.owners)
        for shard in range(len(self.owners)):
            self.backups.append([self.pick(shard)])
        self.even_out()
        for shard in range(len(self.owners)):
            self.add_other_node(shard)
        self.start_moves()
        return tuple(
            ShardPlan(owner, tuple(b), tuple(w for w in b if w not in self.complete[s]))
            for s, (owner, b) in enumerate(zip(self.owners, self.backups, strict=True))
        )

    def same_node(self, shard: int, worker: WorkerId) -> bool:
        return self.several_nodes and self.nodes[worker] == self.nodes[self.owners[shard]]

    def pick(self, shard: int) -> WorkerId:
        """A complete copy if there is one, on another node if there is one, then whoever has least."""
        owner = self.owners[shard]
        copies = (self.complete[shard] - {owner}) or (set(self.workers) - {owner})
        previous = self.before[shard].backups if self.before is not None else ()
        best = min(
            copies,
            key=lambda w: (
                self.same_node(shard, w),
                w not in previous and w in self.complete[shard] and bool(previous),
                self.held[w] + self.pairs[owner, w],
                self.held[w],
                w,
            ),
        )
        self.held[best] += 1
        self.pairs[owner, best] += 1
        return best

    def even_out(self) -> None:
        """Between complete copies the choice is free: no byte moves."""
        moved = True
        while moved:
            moved = False
            for shard, (chosen,) in enumerate(self.backups):
                choice = [
                    w
                    for w in self.complete[shard] - {self.owners[shard], chosen}
                    if self.same_node(shard, w) <= self.same_node(shard, chosen)
                ]
                lightest = min(choice, key=lambda w: (self.held[w], w), default=chosen)
                if self.held[chosen] - self.held[lightest] >= 2 or (
                    lightest != chosen and chosen not in self.complete[shard]
                ):
                    self.replace(shard, chosen, lightest)
                    self.backups[shard] = [lightest]
                    moved = True

    def replace(self, shard: int, old: WorkerId, new: WorkerId) -> None:
        self.held[old] -= 1
        self.held[new] += 1
        if old != self.owners[shard]:
            self.pairs[self.owners[shard], old] -= 1
            self.pairs[self.owners[shard], new] += 1

    def add_other_node(self, shard: int) -> None:
        """A complete backup beside its owner on one node is kept until one elsewhere is filled."""
        (chosen,) = self.backups[shard]
        if not self.same_node(shard, chosen) or chosen not in self.complete[shard]:
            return
        others = [w for w in self.workers if not self.same_node(shard, w) and w not in self.complete[shard]]
        if others:
            new = min(others, key=lambda w: (self.held[w], self.pairs[self.owners[shard], w], w))
            self.backups[shard].append(new)
            self.replace(shard, chosen, new)

    def start_moves(self) -> None:
        """Name a second backup on whoever holds too little, at the cost of whoever holds too much."""
        while True:
            light = min(self.workers, key=lambda w: (self.held[w], w))
            heavy = [w for w in self.workers if self.held[w] - self.held[light] >= 2]
            move = min(
                (
                    (-self.held[holder], shard, holder)
                    for shard in range(len(self.owners))
                    for holder in {self.owners[shard], *self.backups[shard]} & set(heavy)
                    if self.may_move(shard, holder, light)
                ),
                default=None,
            )
            if move is None:
                return
            _, shard, holder = move
            self.backups[shard].append(light)
            self.held[holder] -= 1
            self.held[light] += 1

    def may_move(self, shard: int, holder: WorkerId, light: WorkerId) -> bool:
        """One move per shard at a time, only from a pair of complete copies, never onto its partner's node."""
        owner, backups = self.owners[shard], self.backups[shard]
        if len(backups) > 1 or backups[0] not in self.complete[shard] or light in (owner, *backups):
            return False
        partner = backups[0] if holder == owner else owner
        return not self.several_nodes or self.nodes[light] != self.nodes[partner]
