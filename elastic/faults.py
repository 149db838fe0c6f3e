"""The faults that a job file or `everstep inject` may ask for: their names, targets and text form. Pure.

    kill-worker=ID    SIGKILL to that worker; its agent starts a replacement
    kill-agent=NODE   the node's agent, its workers die with it; it comes back as a new node
    kill-node=NODE    agent and workers; the node stays away until add-node
    kill-controller   the controller; Ray starts it again
    add-node          a new node joins
    stop              end at a step boundary, with a checkpoint

IDs of workers and nodes count up in order of start and are never used again, so a fault names one process for good.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dataloader.errors import UsageError


class FaultKind(StrEnum):
    KILL_WORKER = "kill-worker"
    KILL_AGENT = "kill-agent"
    KILL_NODE = "kill-node"
    KILL_CONTROLLER = "kill-controller"
    ADD_NODE = "add-node"
    STOP = "stop"


TARGETS = {
    FaultKind.KILL_WORKER: "ID",
    FaultKind.KILL_AGENT: "NODE",
    FaultKind.KILL_NODE: "NODE",
}

GRAMMAR = ", ".join(f"{kind}={TARGETS[kind]}" if kind in TARGETS else str(kind) for kind in FaultKind)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; `target` is a worker's or a node's number, and None where the kind takes none."""

    kind: FaultKind
    target: int | None = None

    def __str__(self) -> str:
        return str(self.kind) if self.target is None else f"{self.kind}={self.target}"


def parse_fault(text: str) -> Fault:
    """Read `kill-worker=3` and its like. Raises UsageError with one line that says what is wrong and what is right."""
    name, equals, number = text.strip().partition("=")
    try:
        kind = FaultKind(name)
    except ValueError:
        raise UsageError(f"{text!r} is no fault; use one of {GRAMMAR}") from None
    if kind not in TARGETS:
        if equals:
            raise UsageError(f"{text!r}: {kind} takes no target; write just {kind}")
        return Fault(kind)
    if not (number.isascii() and number.isdigit()):
        raise UsageError(f"{text!r} names no {TARGETS[kind]}; write {kind}={TARGETS[kind]}, as in {kind}=1")
    return Fault(kind, int(number))
