"""The faults that a job file, `everstep inject`, a chaos schedule or a scenario may ask for. Pure.

One vocabulary: the simulator and the processes each have an interpreter for it. A fault is written

    KIND[=NUMBER][,option=value]...        kill-worker=3    freeze-worker=2,during=vote,seconds=4    add-node

    kill-worker=ID         SIGKILL to that worker; its agent starts a replacement
    kill-agent=NODE        the node's agent, its workers die with it; it comes back as a new node
    kill-node=NODE         agent and workers; the node stays away until add-node
    kill-controller        the controller; Ray starts it again
    kill-driver            the job process, and the local Ray with it: what is left is a checkpoint to resume from
    freeze-worker=ID       SIGSTOP, and SIGCONT after `seconds` (else never); also -agent, -node (agent and workers),
                           -controller
    thaw-worker=ID         SIGCONT; also -agent, -node
    slow-worker=ID         its micro-batches take `factor` times as long, for `seconds` (else for good); also -node
    partition-worker=ID    no frame passes between it and the others, or `peer` alone; `way=in|out`: only those to it
                           or from it are held; for `seconds` (else for good)
    partition-node=NODE    the same for a node's workers, and its agent is out of the controller's reach
    delay-worker=ID        each frame from it takes `seconds` longer, to `peer` or to all
    corrupt-worker=ID      one bit of its next frame (what=link), gradient (what=gradient) or of its parameters in
                           memory (what=parameter)
    poison                 the gradient of the next step's first micro-batch is NaN (what=nan) or far too large
                           (what=spike), whoever computes it
    disk-full, store-down  no file of a checkpoint can be written, for `seconds`
    clock-jump=NODE        that node's wall clock is `seconds` ahead (or behind) from now on
    preempt-node=NODE      its agent is told that the node goes away in `seconds`
    add-node               a new node joins
    stop                   end at a step boundary, with a checkpoint

`during` names a protocol point. The fault then waits until its target (the controller: itself; an agent or node: a
worker of it) reaches the point, and happens right before what the point names is done.

IDs of workers and nodes count up in order of start and are never used again, so a fault names one process for good.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from dataloader.errors import UsageError


class FaultKind(StrEnum):
    KILL_WORKER = "kill-worker"
    KILL_AGENT = "kill-agent"
    KILL_NODE = "kill-node"
    KILL_CONTROLLER = "kill-controller"
    KILL_DRIVER = "kill-driver"
    FREEZE_WORKER = "freeze-worker"
    FREEZE_AGENT = "freeze-agent"
    FREEZE_NODE = "freeze-node"
    FREEZE_CONTROLLER = "freeze-controller"
    THAW_WORKER = "thaw-worker"
    THAW_AGENT = "thaw-agent"
    THAW_NODE = "thaw-node"
    SLOW_WORKER = "slow-worker"
    SLOW_NODE = "slow-node"
    PARTITION_WORKER = "partition-worker"
    PARTITION_NODE = "partition-node"
    DELAY_WORKER = "delay-worker"
    CORRUPT_WORKER = "corrupt-worker"
    POISON = "poison"
    DISK_FULL = "disk-full"
    STORE_DOWN = "store-down"
    CLOCK_JUMP = "clock-jump"
    PREEMPT_NODE = "preempt-node"
    ADD_NODE = "add-node"
    STOP = "stop"


class Point(StrEnum):
    """A protocol point: what the target is just about to do."""

    REDUCE = "reduce"  # send its contribution
    VOTE = "vote"  # send a record
    PUBLISH = "publish"  # send new parameters
    PLAN = "plan"  # install a plan; the controller: send one
    HANDOVER = "handover"  # send or take a shard's snapshot
    JOIN = "join"  # install its first plan
    SAVE = "save"  # write a file of a checkpoint


POINTS = frozenset(Point)
K = FaultKind


@dataclass(frozen=True, slots=True)
class Form:
    """How a kind is written: `number` names what it hits; `options`: allowed; `needs`: and demanded."""

    number: str = ""  # "": takes none
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    points: frozenset[Point] = frozenset()
    whats: tuple[str, ...] = ()


FORMS: dict[FaultKind, Form] = {
    K.KILL_WORKER: Form("ID", points=POINTS),
    K.KILL_AGENT: Form("NODE", points=POINTS),
    K.KILL_NODE: Form("NODE", points=POINTS),
    K.KILL_CONTROLLER: Form(points=frozenset({Point.PLAN, Point.SAVE})),
    K.KILL_DRIVER: Form(),
    K.FREEZE_WORKER: Form("ID", ("seconds",), points=POINTS),
    K.FREEZE_AGENT: Form("NODE", ("seconds",)),
    K.FREEZE_NODE: Form("NODE", ("seconds",)),
    K.FREEZE_CONTROLLER: Form(options=("seconds",)),
    K.THAW_WORKER: Form("ID"),
    K.THAW_AGENT: Form("NODE"),
    K.THAW_NODE: Form("NODE"),
    K.SLOW_WORKER: Form("ID", ("factor", "seconds"), ("factor",)),
    K.SLOW_NODE: Form("NODE", ("factor", "seconds"), ("factor",)),
    K.PARTITION_WORKER: Form("ID", ("peer", "way", "seconds"), points=POINTS),
    K.PARTITION_NODE: Form("NODE", ("way", "seconds")),
    K.DELAY_WORKER: Form("ID", ("peer", "seconds"), ("seconds",), POINTS),
    K.CORRUPT_WORKER: Form("ID", ("what",), ("what",), whats=("link", "gradient", "parameter")),
    K.POISON: Form(options=("what",), needs=("what",), whats=("nan", "spike")),
    K.DISK_FULL: Form(options=("seconds",), needs=("seconds",)),
    K.STORE_DOWN: Form(options=("seconds",), needs=("seconds",)),
    K.CLOCK_JUMP: Form("NODE", ("seconds",), ("seconds",)),
    K.PREEMPT_NODE: Form("NODE", ("seconds",), ("seconds",)),
    K.ADD_NODE: Form(),
    K.STOP: Form(),
}


def _shown(kind: FaultKind) -> str:
    form = FORMS[kind]
    return str(kind) + (f"={form.number}" if form.number else "") + "".join(f",{name}=..." for name in form.needs)


GRAMMAR = ", ".join(_shown(kind) for kind in FaultKind)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; `target` is a worker's or a node's number, and None where the kind takes none. The rest: see above."""

    kind: FaultKind
    target: int | None = None
    during: Point | None = None
    peer: int | None = None
    way: str | None = None
    what: str | None = None
    factor: float | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        named = str(self.kind) if self.target is None else f"{self.kind}={self.target}"
        given = [(name, getattr(self, name)) for name in OPTIONS]
        return named + "".join(f",{name}={_text(value)}" for name, value in given if value is not None)


OPTIONS = tuple(field.name for field in fields(Fault))[2:]


def parse_fault(text: str) -> Fault:
    """Read `kill-worker=3` and its like. Raises UsageError with one line that says what is wrong and what is right."""
    named, *options = (part.strip() for part in text.split(","))
    name, equals, number = named.partition("=")
    try:
        kind = FaultKind(name)
    except ValueError:
        raise UsageError(f"{text!r} is no fault; use one of {GRAMMAR}") from None
    form = FORMS[kind]
    target = _target(text, kind, equals, number)
    given: dict[str, Any] = {}
    for option in options:
        key, _, value = option.partition("=")
        allowed = (*form.options, *(("during",) if form.points else ()))
        if key not in allowed:
            takes = f"takes {', '.join(allowed)} only" if allowed else "takes no options"
            raise UsageError(f"{text!r}: {kind} {takes}")
        if key in given:
            raise UsageError(f"{text!r}: {key} is there twice")
        given[key] = _value(text, form, key, value)
    for key in form.needs:
        if key not in given:
            raise UsageError(f"{text!r}: {kind} needs {key}; write {_shown(kind)}")
    return Fault(kind, target, **given)


def _target(text: str, kind: FaultKind, equals: str, number: str) -> int | None:
    wanted = FORMS[kind].number
    if not wanted:
        if equals:
            raise UsageError(f"{text!r}: {kind} takes no target; write just {kind}")
        return None
    if not (number.isascii() and number.isdigit()):
        raise UsageError(f"{text!r} names no {wanted}; write {kind}={wanted}, as in {kind}=1")
    return int(number)


def _value(text: str, form: Form, key: str, value: str) -> Any:
    if key == "during":
        return _one_of(text, key, value, sorted(form.points), Point)
    if key == "what":
        return _one_of(text, key, value, form.whats, str)
    if key == "way":
        return _one_of(text, key, value, ("in", "out"), str)
    if key == "peer":
        if value.isascii() and value.isdigit():
            return int(value)
        raise UsageError(f"{text!r}: peer is a worker's ID, as in peer=1")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if key == "factor" and not 1.0 <= number < math.inf:
        raise UsageError(f"{text!r}: factor is a number of 1 or more, as in factor=4")
    if not math.isfinite(number):
        raise UsageError(f"{text!r}: seconds is a number, as in seconds=2.5")
    return number


def _one_of(text: str, key: str, value: str, allowed: Any, make: Callable[[str], Any]) -> Any:
    if value not in allowed:
        raise UsageError(f"{text!r}: {key} is one of {', '.join(allowed)}")
    return make(value)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
