"""The job's schedule of faults: what is due, what is being waited for, what is over. Pure.

A fault is recorded as injected before it is done and never repeated, also by a restarted controller or a replay after
a rollback; one whose target is gone is skipped. A fault that `wait`s is done at the boundary before its step, which
all workers hold (runtime/step.py, gates) until its effect is complete.

    pending ──due──▶ injected ──effect complete──▶ over          pending ──target gone──▶ over
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from elastic.faults import FORMS, OPTIONS, Fault, FaultKind, parse_fault
from elastic.messages import (
    Action,
    CutAgent,
    FailStore,
    Freeze,
    FreezeController,
    JumpClock,
    KillAgent,
    KillController,
    KillDriver,
    KillWorker,
    PreemptAgent,
    StartAgent,
    Thaw,
    ThawAgent,
    ToWorker,
)
from elastic.roster import Node, Roster
from runtime.injected import STORE_FAILURES
from runtime.protocol import WorkerId

POISON_AHEAD = 5  # steps


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
    nodes_before: int = 0  # node numbers given out before it

    def durable(self) -> list[Any]:
        return [self.index, self.state, self.incarnation, self.nodes_before]


class Schedule:
    def __init__(self, entries: Iterable[FaultEntry]) -> None:
        self._arrived: set[int] = set()  # steps at whose boundary somebody waits
        self.faults = [
            Scheduled(index, entry.at_step, parse_fault(entry.fault), entry.wait) for index, entry in enumerate(entries)
        ]

    def restore(self, state: Iterable[list[Any]]) -> None:
        known = {f.index: f for f in self.faults}
        for index, *values in state:
            if index in known:
                fault = known[index]
                fault.state, fault.incarnation, fault.nodes_before = values

    def durable(self) -> list[list[Any]]:
        return [f.durable() for f in self.faults if f.state != "pending"]

    def arrive(self, step: int) -> bool:
        """Somebody waits at the boundary before this step; whether it is free."""
        self._arrived.add(step)
        return self.released(step)

    def rewind(self) -> None:
        """After a rollback everybody comes to the boundaries again."""
        self._arrived.clear()

    def due(self, ledger_next: int) -> Scheduled | None:
        """The next fault to inject. One at a time, in the order of the file; a waited-for one blocks its step."""
        for fault in sorted(self.faults, key=lambda f: (f.at_step, f.index)):
            if fault.state == "injected" and fault.wait:
                return None
            if fault.state == "pending":
                waited_for = not fault.wait or fault.at_step in self._arrived
                return fault if waited_for and ledger_next >= fault.at_step else None
        return None

    def take_over(self, kind: FaultKind, target: int, incarnation: int) -> Fault | None:
        """This fault, if an earlier controller recorded it; it may have died before it was done."""
        for known in self.faults:
            same = known.fault.kind is kind and known.fault.target == target
            if same and known.state == "injected" and known.incarnation < incarnation:
                known.incarnation = incarnation
                return known.fault
        return None

    def held(self) -> frozenset[int]:
        """Steps that nobody begins before their fault is over."""
        return frozenset(f.at_step for f in self.faults if f.wait and f.state != "over")

    def waited_for(self) -> list[Scheduled]:
        return [f for f in self.faults if f.state == "injected" and f.wait]

    def released(self, step: int) -> bool:
        """Whether the boundary before this step is free."""
        return all(f.state == "over" for f in self.faults if f.at_step == step and f.wait)


def actions_of(fault: Fault, roster: Roster) -> list[Action] | str:
    """What does the fault; text: why its target is gone. Nothing for `stop`, which is a plan's business."""
    kind, target = fault.kind, -1 if fault.target is None else fault.target
    match FORMS[kind].number:
        case "ID":
            return _on_worker(fault, roster, target) if roster.lives(target) else f"worker {target} is not there"
        case "NODE":
            node = roster.nodes.get(target)
            return _on_node(fault, roster, node) if node and node.alive else f"node {target} is not there"
    match kind:
        case FaultKind.KILL_CONTROLLER:
            return [KillController()]
        case FaultKind.FREEZE_CONTROLLER:
            return [FreezeController(fault.seconds)]
        case FaultKind.KILL_DRIVER:
            return [KillDriver()]
        case FaultKind.DISK_FULL | FaultKind.STORE_DOWN:
            everyone: list[Action] = [ToWorker(w.slot, w.id, in_worker(fault)) for w in roster.living()]
            return [*everyone, FailStore(fault.seconds or 0.0, STORE_FAILURES[str(kind)])]
        case FaultKind.ADD_NODE:
            return [StartAgent(roster.new_slot())]
        case FaultKind.STOP:
            return []
        case FaultKind.POISON:
            return _poison(fault, roster)
    return f"{kind} is not known here"


def _on_worker(fault: Fault, roster: Roster, worker: WorkerId) -> list[Action]:
    slot = roster.workers[worker].slot
    if fault.during is None:
        match fault.kind:
            case FaultKind.KILL_WORKER:
                return [KillWorker(slot, worker, fault=True)]
            case FaultKind.FREEZE_WORKER:
                return [Freeze(slot, worker, fault.seconds)]
            case FaultKind.THAW_WORKER:
                return [Thaw(slot, worker)]
    return [ToWorker(slot, worker, in_worker(fault))]


def _on_node(fault: Fault, roster: Roster, node: Node) -> list[Action] | str:
    workers = [w.id for w in roster.living() if w.node == node.id]
    again = fault.kind is FaultKind.KILL_AGENT and not node.leaving
    if again and node.slot not in roster.slots:
        return f"node {node.id} is being killed for good"
    if fault.kind is FaultKind.KILL_NODE:
        roster.slots.discard(node.slot)
    match fault.kind:
        case FaultKind.KILL_AGENT | FaultKind.KILL_NODE if fault.during is None:
            return [KillAgent(node.slot, again)]
        case FaultKind.FREEZE_AGENT | FaultKind.FREEZE_NODE:
            return [Freeze(node.slot, -1, fault.seconds, whole=fault.kind is FaultKind.FREEZE_NODE)]
        case FaultKind.THAW_AGENT | FaultKind.THAW_NODE:
            return [ThawAgent(node.slot)]
        case FaultKind.CLOCK_JUMP:
            return [JumpClock(node.slot, fault.seconds or 0.0)]
        case FaultKind.PREEMPT_NODE:
            return [PreemptAgent(node.slot, fault.seconds or 0.0)]
        case FaultKind.KILL_AGENT | FaultKind.KILL_NODE:  # one of its workers does it, where it comes to the point
            if not workers:
                return f"node {node.id} has no worker that could come to {fault.during}"
            return [ToWorker(node.slot, min(workers), in_worker(fault))]
    told: list[Action] = [ToWorker(node.slot, worker, in_worker(fault, workers)) for worker in workers]
    return [*told, CutAgent(node.slot, fault.seconds)] if fault.kind is FaultKind.PARTITION_NODE else told


def _poison(fault: Fault, roster: Roster) -> list[Action]:
    """To all workers, and of a step that none can have begun when it hears of it: they must agree on the data."""
    step = POISON_AHEAD + max((w.progress[0] for w in roster.living()), default=-1)
    message = in_worker(fault)
    message["fault"]["step"] = step
    return [ToWorker(w.slot, w.id, message) for w in roster.living()]


def in_worker(fault: Fault, spared: Iterable[WorkerId] = ()) -> dict[str, Any]:
    """The message to a worker that does the fault to itself (runtime/injected.py). A partition never means `spared`."""
    options = {name: getattr(fault, name) for name in OPTIONS}
    during = None if fault.during is None else str(fault.during)
    return {"kind": "inject", "fault": {"kind": str(fault.kind), **options, "during": during, "spared": list(spared)}}


def has_acted(waited: Scheduled, roster: Roster, incarnation: int) -> bool:
    """Whether what the fault does has been done; that everything has settled since is the controller's to say."""
    target = -1 if waited.fault.target is None else waited.fault.target
    match waited.fault.kind:
        case FaultKind.KILL_WORKER:
            return not roster.lives(target)
        case FaultKind.KILL_NODE | FaultKind.PREEMPT_NODE:
            return target not in roster.nodes or not roster.nodes[target].alive
        case FaultKind.KILL_AGENT if target in roster.nodes and roster.nodes[target].leaving:  # it never comes back
            return not roster.nodes[target].alive
        case FaultKind.KILL_AGENT | FaultKind.ADD_NODE:
            return any((n.alive or n.leaving) and n.id >= waited.nodes_before for n in roster.nodes.values())
        case FaultKind.KILL_CONTROLLER:
            return incarnation > waited.incarnation
        case FaultKind.FREEZE_WORKER if waited.fault.seconds is None:  # it is found, and replaced
            return not roster.lives(target)
        case FaultKind.FREEZE_NODE | FaultKind.FREEZE_AGENT if waited.fault.seconds is None:
            return any(n.alive and n.id >= waited.nodes_before for n in roster.nodes.values())
        case FaultKind.FREEZE_CONTROLLER if waited.fault.seconds is None:
            return incarnation > waited.incarnation
        case _:
            return True
