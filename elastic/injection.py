"""The job's schedule of faults: what is due, what is being waited for, what is over. Pure.

A fault is recorded as injected before it is done and never repeated, also by a restarted controller or a replay after
a rollback; one whose target is gone is skipped. A fault that `wait`s is done at the boundary before its step, which
all workers hold (runtime/step.py, gates) until its effect is complete.

    pending ──due──▶ injected ──effect complete──▶ over          pending ──target gone──▶ over
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from elastic.faults import Fault, parse_fault


class FaultEntry(Protocol):
    """One entry of the job file's `faults`."""

    @property
    def at_step(self) -> int: ...
    @property
    def fault(self) -> str: ...
    @property
    def wait(self) -> bool: ...


@dataclass(slots=True)
class Scheduled:
    index: int
    at_step: int
    fault: Fault
    wait: bool
    state: str = "pending"  # pending | injected | over
    incarnation: int = 0  # of the controller that injected it
    node: int = -1  # the node it aimed at, or that it made come
    nodes_before: int = 0  # node numbers given out before it

    def durable(self) -> list[Any]:
        return [self.index, self.state, self.incarnation, self.node, self.nodes_before]


class Schedule:
    def __init__(self, entries: Iterable[FaultEntry]) -> None:
        self.faults = [
            Scheduled(index, entry.at_step, parse_fault(entry.fault), entry.wait) for index, entry in enumerate(entries)
        ]

    def restore(self, state: Iterable[list[Any]]) -> None:
        known = {f.index: f for f in self.faults}
        for index, *values in state:
            if index in known:
                fault = known[index]
                fault.state, fault.incarnation, fault.node, fault.nodes_before = values

    def durable(self) -> list[list[Any]]:
        return [f.durable() for f in self.faults if f.state != "pending"]

    def due(self, ledger_next: int, at_gates: Mapping[int, int]) -> Scheduled | None:
        """The next fault to inject. One at a time, in the order of the file; a waited-for one blocks its step."""
        for fault in sorted(self.faults, key=lambda f: (f.at_step, f.index)):
            if fault.state == "injected" and fault.wait:
                return None
            if fault.state == "pending":
                reached = at_gates.get(fault.at_step, 0) > 0 if fault.wait else ledger_next >= fault.at_step
                return fault if reached else None
        return None

    def waited_for(self) -> list[Scheduled]:
        return [f for f in self.faults if f.state == "injected" and f.wait]

    def released(self, step: int) -> bool:
        """Whether the boundary before this step is free."""
        return all(f.state == "over" for f in self.faults if f.at_step == step and f.wait)
