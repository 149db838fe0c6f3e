"""Who holds what: even, on two nodes, without moving a byte that needn't move, and never in circles."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from elastic.placement import place_shards, spread
from runtime.protocol import ShardPlan


def held(plans: tuple[ShardPlan, ...]) -> Counter[int]:
    return Counter(w for p in plans for w in (p.owner, *p.backups))


def settle(workers: list[int], nodes: dict[int, int], plans: tuple[ShardPlan, ...]) -> tuple[ShardPlan, ...]:
    """Fill what is to be filled and plan again, as the controller does, until nothing moves."""
    for _ in range(50):
        if all(len(p.backups) == 1 for p in plans):
            return plans
        plans = place_shards(workers, nodes, [{p.owner, *p.backups} for p in plans], plans)
    raise AssertionError("it goes in circles")


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("shards", [8, 12, 16])
def test_a_start_is_even(workers: int, shards: int) -> None:
    ids = list(range(workers))
    nodes = {w: w * 2 // workers for w in ids}
    plans = place_shards(ids, nodes, [set(ids)] * shards, None)
    owned = Counter(p.owner for p in plans)
    assert max(owned.values()) - min(owned[w] for w in ids) <= 1
    if workers % 2 == 0:  # else the smaller node must hold a copy of everything
        assert max(held(plans).values()) - min(held(plans)[w] for w in ids) <= 2
    assert all(nodes[p.owner] != nodes[p.backups[0]] and not p.fill for p in plans)


def test_the_dead_workers_backups_are_promoted_and_no_complete_copy_is_filled_anew() -> None:
    ids = list(range(4))
    nodes = {w: w // 2 for w in ids}
    before = place_shards(ids, nodes, [set(ids)] * 8, None)
    copies = [{p.owner, *p.backups} - {1} for p in before]
    plans = place_shards([0, 2, 3], nodes, copies, before)
    for shard, p in enumerate(plans):
        assert p.owner in copies[shard]
        assert not set(p.fill) & copies[shard]
        assert nodes[p.owner] != nodes[p.backups[-1]]


@pytest.mark.parametrize("seed", range(200))
def test_any_history_settles_evenly(seed: int) -> None:
    chance = random.Random(seed)
    shards = chance.choice([4, 8, 12])
    ids = list(range(chance.randint(2, 6)))
    nodes = {w: chance.randrange(3) for w in ids}
    plans = place_shards(ids, nodes, [set(ids)] * shards, None)
    complete = [{p.owner, *p.backups} for p in plans]
    for newest in range(10, 16):
        if len(ids) > 2 and chance.random() < 0.5:
            gone = chance.choice(ids)
            ids = [w for w in ids if w != gone]
            complete = [c - {gone} for c in complete]
        else:
            ids = [*ids, newest]
            nodes[newest] = chance.randrange(3)
        plans = settle(ids, nodes, place_shards(ids, nodes, complete, plans))
        complete = [{p.owner, *p.backups} for p in plans]
        if len({nodes[w] for w in ids}) > 1:
            assert all(nodes[p.owner] != nodes[p.backups[0]] for p in plans)
        if len({nodes[w] for w in ids}) in (1, len(ids)):
            counts = held(plans)
            assert max(counts.values()) - min(counts[w] for w in ids) <= 2


def test_one_worker_has_all_and_no_backup() -> None:
    assert place_shards([7], {7: 0}, [{7}, {7}], None) == (ShardPlan(7, ()), ShardPlan(7, ()))


def test_spread_is_contiguous() -> None:
    assert spread(8, [3, 5, 9]) == (3, 3, 3, 5, 5, 5, 9, 9)
