"""What status.json said of a job, as a value. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Seat:
    worker: int
    node: int
    role: str  # member | standby | starting


@dataclass(frozen=True, slots=True)
class Standing:
    """`time`: when it was said, on the wall clock."""

    time: float = 0.0
    state: str = "starting"
    step: int = 0
    incarnation: int = 0
    without_backup: int = 0
    seats: tuple[Seat, ...] = ()

    def without(self, workers: Collection[int]) -> Standing:
        return replace(self, seats=tuple(s for s in self.seats if s.worker not in workers))

    def members(self) -> list[int]:
        return sorted(s.worker for s in self.seats if s.role == "member")

    def standbys(self) -> list[int]:
        return sorted(s.worker for s in self.seats if s.role == "standby")

    def nodes(self) -> list[int]:
        """Nodes that some living worker is on, starting ones included."""
        return sorted({s.node for s in self.seats})

    def nodes_of_members(self) -> list[int]:
        return sorted({s.node for s in self.seats if s.role == "member"})

    def on(self, node: int | None) -> list[int]:
        """The members on a node."""
        return sorted(s.worker for s in self.seats if s.node == node and s.role == "member")


def read_standing(status: Mapping[str, Any] | None) -> Standing:
    """Whatever is missing or of another kind is left at its default: a viewer must not fail on a file."""
    if not status:
        return Standing()
    members = status.get("members")
    seats = tuple(
        Seat(m["id"], m["node"], str(m.get("role")))
        for m in (members if isinstance(members, list) else [])
        if isinstance(m, dict) and isinstance(m.get("id"), int) and isinstance(m.get("node"), int)
    )

    def number(name: str) -> int:
        value = status.get(name)
        return value if isinstance(value, int) else 0

    time = status.get("time")
    return Standing(
        time=float(time) if isinstance(time, (int, float)) else 0.0,
        state=str(status.get("state", "starting")),
        step=number("step"),
        incarnation=number("incarnation"),
        without_backup=number("shards_without_backup"),
        seats=seats,
    )
