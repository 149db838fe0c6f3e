"""Which response a fault gets: the tiers, in the order in which they are tried. Pure.

    standby        a warm process takes the place of who is lost, in the same change of members
    redistribute   the rest take its logical ranks over; the global batch stays
    rejoin         somebody comes back, or is new
    checkpoint     every holder of a shard is lost: back to the newest checkpoint, and replay to the same bits
    stop           a checkpoint is written where that is still possible, and the job ends with the reason

A job file's `policy` says where a kind of fault starts in this order. (Bad steps are the guard's, slow workers the
balance's.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from runtime.protocol import Plan, WorkerId


class Tier(StrEnum):
    START = "start"
    STANDBY = "standby"
    REDISTRIBUTE = "redistribute"
    REJOIN = "rejoin"
    CHECKPOINT = "checkpoint"
    MOVE = "move"  # no fault: copies or work move, or a new controller takes over


@dataclass(frozen=True, slots=True)
class Policy:
    """The job file's section (elastic/config.py)."""

    worker_lost: str = "standby"
    node_lost: str = "standby"
    holders_lost: str = "checkpoint"
    restarts: int = 4

    def lost(self, notice: str) -> tuple[str, str]:
        """(the setting's name, its value) for a member whose loss was noticed like this."""
        name = "node_lost" if notice in NODE_NOTICES else "worker_lost"
        return name, getattr(self, name)


NODE_NOTICES = ("agent", "silent")


def tier_of(plan: Plan, before: Collection[WorkerId]) -> Tier:
    """The response that a plan is, to what happened to the members `before`."""
    now = set(plan.ids())
    if not before:
        return Tier.START
    if plan.checkpoint is not None:
        return Tier.CHECKPOINT
    lost, come = set(before) - now, now - set(before)
    if lost:
        return Tier.STANDBY if come else Tier.REDISTRIBUTE
    return Tier.REJOIN if come else Tier.MOVE
