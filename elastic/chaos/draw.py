"""A schedule of faults: drawn from a seed, or read from a file. Pure.

When what happens is a function of the seed alone. Whom it hits can't be, since IDs depend on who has been replaced by
then: so each fault has a lot in [0, 1), which picks among those who are there, in the order of their IDs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from elastic.chaos.standing import Standing
from elastic.faults import Fault, FaultKind, Point

K = FaultKind


class Among(StrEnum):
    """Whom a fault's lot is drawn among."""

    MEMBER = "members"
    STANDBY = "standbys"  # where there is none: members
    NODE = "nodes"
    NAMED = "named"  # nobody: the fault says itself whom it hits, or hits nobody


@dataclass(frozen=True, slots=True)
class Weighted:
    """How often a kind is drawn, relative to the others, and how its options are."""

    kind: FaultKind
    weight: float
    among: Among = Among.NAMED
    options: Callable[[random.Random], dict[str, Any]] = lambda rng: {}


IN_EVERY_STEP = (Point.REDUCE, Point.VOTE, Point.PUBLISH)  # so that the fault happens within a step


def _some_seconds(rng: random.Random) -> float:
    return round(rng.uniform(0.5, 6.0), 1)


# What `everstep chaos` draws from. Kinds that change the ledger (poison) are for files only: the undisturbed run has to
# have them too. `stop` and kill-driver end the job.
KINDS: tuple[Weighted, ...] = (
    Weighted(K.KILL_WORKER, 8.0, Among.MEMBER),
    Weighted(K.KILL_WORKER, 3.0, Among.MEMBER, lambda rng: {"during": rng.choice(IN_EVERY_STEP)}),
    Weighted(K.KILL_WORKER, 1.0, Among.STANDBY),
    Weighted(K.KILL_AGENT, 2.0, Among.NODE),
    Weighted(K.KILL_NODE, 2.0, Among.NODE),
    Weighted(K.PREEMPT_NODE, 1.0, Among.NODE, lambda rng: {"seconds": round(rng.uniform(2.0, 8.0), 1)}),
    Weighted(K.KILL_CONTROLLER, 2.0),
    Weighted(K.FREEZE_WORKER, 2.0, Among.MEMBER),  # for good: it has to be found and replaced
    Weighted(K.FREEZE_WORKER, 1.0, Among.MEMBER, lambda rng: {"seconds": _some_seconds(rng)}),
    Weighted(K.FREEZE_NODE, 1.0, Among.NODE, lambda rng: {"seconds": _some_seconds(rng)}),
    Weighted(K.FREEZE_CONTROLLER, 1.0, options=lambda rng: {"seconds": _some_seconds(rng)}),
    Weighted(K.PARTITION_WORKER, 1.0, Among.MEMBER, lambda rng: {"seconds": _some_seconds(rng)}),
    Weighted(K.CORRUPT_WORKER, 1.0, Among.MEMBER, lambda rng: {"what": "link"}),
    Weighted(K.DISK_FULL, 0.5, options=lambda rng: {"seconds": _some_seconds(rng)}),
    Weighted(K.STORE_DOWN, 0.5, options=lambda rng: {"seconds": _some_seconds(rng)}),
)
CHANGES_THE_LEDGER = frozenset({K.POISON})
ENDS_THE_JOB = frozenset({K.STOP, K.KILL_DRIVER})
TAKES_A_NODE = frozenset({K.KILL_NODE, K.PREEMPT_NODE})
NODE_BACK_SECONDS = (2.0, 6.0)  # after it was taken


@dataclass(frozen=True, slots=True)
class Entry:
    """One fault of a schedule. Its target is open unless it is NAMED."""

    at_seconds: float
    fault: Fault
    among: Among = Among.NAMED
    lot: float = 0.0
    drawn: bool = False


def draw(seed: int, seconds: float, mtbf_seconds: float, kinds: Sequence[Weighted] = KINDS) -> tuple[Entry, ...]:
    """Faults with exponential gaps until `seconds`, in order; each node that is taken comes back a little later."""
    rng = random.Random(seed)
    weights = [weighted.weight for weighted in kinds]
    entries: list[Entry] = []
    at = rng.expovariate(1.0 / mtbf_seconds)
    while at < seconds:
        weighted = rng.choices(kinds, weights)[0]
        lot, back = rng.random(), rng.uniform(*NODE_BACK_SECONDS)  # drawn for all, so that kinds don't shift the rest
        entries.append(Entry(at, Fault(weighted.kind, **weighted.options(rng)), weighted.among, lot, drawn=True))
        if weighted.kind in TAKES_A_NODE:
            notice = entries[-1].fault.seconds or 0.0
            entries.append(Entry(at + notice + back, Fault(K.ADD_NODE), Among.NODE, drawn=True))
        at += rng.expovariate(1.0 / mtbf_seconds)
    return tuple(sorted(entries, key=lambda entry: entry.at_seconds))


@dataclass(frozen=True, slots=True)
class Aim:
    """Whom an entry hits now: the fault with its target and the members that it costs; or why it is passed over."""

    fault: Fault | None
    victims: tuple[int, ...] = ()
    why_not: str = ""


def aim(entry: Entry, standing: Standing, lacking: int, may_take_a_node: bool) -> Aim:
    """`lacking`: nodes taken and not given back. Where no node may be taken, a worker is killed instead."""
    fault = entry.fault
    match entry.among:
        case Among.NAMED:
            return Aim(fault, victims(fault, standing))
        case Among.NODE if fault.kind is K.ADD_NODE:
            return Aim(fault) if lacking > 0 else Aim(None, why_not="no node is lacking")
        case Among.NODE if fault.kind in TAKES_A_NODE and not may_take_a_node:
            fault, there = Fault(K.KILL_WORKER), standing.members()
        case Among.NODE:
            there = standing.nodes_of_members()
        case Among.STANDBY:
            there = standing.standbys() or standing.members()
        case Among.MEMBER:
            there = standing.members()
    if not there:
        return Aim(None, why_not="nobody is there")
    fault = replace(fault, target=there[int(entry.lot * len(there))])
    return Aim(fault, victims(fault, standing))


OF_A_WORKER = frozenset(
    {K.KILL_WORKER, K.FREEZE_WORKER, K.PARTITION_WORKER, K.CORRUPT_WORKER, K.SLOW_WORKER, K.DELAY_WORKER}
)
OF_A_NODE = frozenset({K.KILL_AGENT, K.KILL_NODE, K.FREEZE_NODE, K.PARTITION_NODE, K.PREEMPT_NODE, K.SLOW_NODE})


def victims(fault: Fault, standing: Standing) -> tuple[int, ...]:
    """Members that the fault hits."""
    if fault.kind in OF_A_WORKER:
        return tuple(w for w in standing.members() if w == fault.target)
    if fault.kind in OF_A_NODE:
        return tuple(standing.on(fault.target))
    return ()
