"""Departures alone, without other faults: each within its deadline, nothing computed again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.balance import NEVER
from runtime.guard import GuardRules
from tests.sim import preemption
from tests.sim.faults import Chance, Faults
from tests.sim.job import FaultEntry
from tests.sim.values import Reference
from tests.sim.world import World
from tests.sim.wrongs import Wrongs


def departing(seed: int, *faults: Chance, entries: tuple[FaultEntry, ...] = ()) -> tuple[World, list[dict[str, Any]]]:
    world = World(seed)
    world.job = replace(world.job, faults=entries, balance=NEVER, guard=GuardRules(), skips=frozenset())
    world.reference = Reference(seed, world.job)
    world.faults, world.wrongs = Faults(world, False), Wrongs(world, False)
    world.faults.planned = list(faults)
    assert world.run().violation is None
    return world, [dict(e) for _, kind, e in world.disk.events if kind == "departure"]


def nothing_lost(world: World, departures: list[dict[str, Any]]) -> None:
    assert all(d["handed_over"] and d["recomputed"] == 0 for d in departures), departures
    assert all(d["seconds"] < d["deadline_seconds"] for d in departures)
    kinds = [kind for _, kind, _ in world.disk.events]
    assert "recovery" not in kinds
    assert "fault_detected" not in kinds
    assert world.checks.recomputed == 0


def going(point: str, count: int, latest: int = 2, chained: bool = False) -> Chance:
    return Chance(preemption.KIND, point, count, 0, latest, chained, True)


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "SECONDS", (600.0,))


@pytest.mark.parametrize("seed", range(12))
def test_one_node_leaves(seed: int) -> None:
    point = ("compute", "reduced", "vote", "certified", "publish", "install")[seed % 6]
    world, departures = departing(seed, going(point, 1 + seed))
    let_go = [e for _, kind, e in world.disk.events if kind == "member_left"]
    assert len(let_go) == world.job.workers_per_node  # the job may end before the node is gone
    nothing_lost(world, departures)


@pytest.mark.parametrize("seed", range(8))
def test_two_or_all_leave_at_once(seed: int) -> None:
    """Where nobody stays, all goes to a checkpoint; the one who looks after the job adds a node then."""
    world, departures = departing(seed, going("vote", 2), going("compute", 1, 3, True), going("plan", 1, 4, True))
    assert departures
    nothing_lost(world, departures)


@pytest.mark.parametrize("seed", range(6))
def test_at_a_boundary_that_is_held_until_it_is_gone(seed: int) -> None:
    entries = (FaultEntry(4, "preempt-node=1,seconds=600", True),)
    world, departures = departing(seed, entries=entries)
    assert [d["node"] for d in departures] == [1]
    nothing_lost(world, departures)
