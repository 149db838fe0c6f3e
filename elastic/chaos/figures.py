"""What a run's records say of its faults: what each one cost, by kind, and how fast the job went all the same. Pure.

    detect_ms    the fault -> the first notice of it anywhere; of a killed controller: -> its successor's first plan
    pause_ms     the `recovery` event's: first notice -> the last waiting survivor goes on
    replaced_ms  the fault -> its recovery is over

A recovery belongs to the first fault that cost one of its workers: what else fell into it is counted there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic.chaos.conduct import Injection
from elastic.chaos.draw import OF_A_WORKER
from elastic.faults import FaultKind, parse_fault
from runtime.protocol import StepRecord

Event = Mapping[str, Any]
CLOCK_SLACK_SECONDS = 0.05
LOSSES = ("kill-", "freeze-")  # others need not be noticed: a delay costs nobody, a node that is told to go just goes


@dataclass(slots=True)
class Disturbance:
    """A fault that was injected, as the events tell it."""

    kind: str
    fault: str
    time: float
    victims: tuple[int, ...] = ()
    whole: bool = False
    detected: bool | None = None  # None: nobody was hit, so there is nothing to detect
    detect_ms: float | None = None
    pause_ms: float | None = None
    replaced_ms: float | None = None
    recomputed: int = 0
    bytes_moved: int = 0
    rollback: bool = False

    def hits(self) -> set[int]:
        """Its victims, and a worker that has become a member only since the status was written."""
        fault = parse_fault(self.fault)
        named = fault.kind in OF_A_WORKER and fault.target is not None
        return {*self.victims, fault.target} if named and fault.target is not None else set(self.victims)

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"victims": list(self.victims)}


def disturbances(events: Sequence[Event], injections: Sequence[Injection]) -> list[Disturbance]:
    """All faults of a run, the job file's own too, in their order, with what became of them. `stop` is none."""
    asked = list(injections)
    found: list[Disturbance] = []
    for event in events:
        if event.get("kind") == "fault_injected" and event.get("fault") != str(FaultKind.STOP):
            found.append(_injected(event, asked, events))
    for number, disturbance in enumerate(found):
        later = found[number + 1 :]
        _tell(disturbance, [e for e in events if _time(e) >= disturbance.time - CLOCK_SLACK_SECONDS], later)
    _assign_recoveries(found, [e for e in events if e.get("kind") == "recovery"])
    return found


def _injected(event: Event, asked: list[Injection], events: Sequence[Event]) -> Disturbance:
    text, time = str(event.get("fault")), _time(event)
    fault = parse_fault(text)
    known = next((i for i in asked if i.fault == text and i.time <= time + CLOCK_SLACK_SECONDS), None)
    if known is not None:
        asked.remove(known)
        return Disturbance(str(fault.kind), text, time, known.victims, known.whole)
    own = "worker" in fault.kind and fault.target is not None
    return Disturbance(str(fault.kind), text, time, (fault.target,) if own and fault.target is not None else ())


def _tell(disturbance: Disturbance, events: Sequence[Event], later: Sequence[Disturbance]) -> None:
    if disturbance.kind == FaultKind.KILL_CONTROLLER:
        until = next((d.time for d in later if d.kind == disturbance.kind), math.inf)
        plans = (_time(e) for e in events if e.get("kind") == "plan" and e.get("reason") == "new controller")
        back = next((time for time in plans if disturbance.time <= time < until), None)
        disturbance.detected = back is not None
        disturbance.detect_ms = None if back is None else (back - disturbance.time) * 1e3
    elif disturbance.victims:
        victims = set(disturbance.victims)
        notices = [e for e in events if e.get("kind") == "fault_detected" and e.get("worker") in victims]
        if notices or disturbance.kind.startswith(LOSSES):
            disturbance.detected = bool(notices)
        if notices:
            disturbance.detect_ms = max(0.0, (_time(notices[0]) - disturbance.time) * 1e3)


def _assign_recoveries(found: Sequence[Disturbance], recoveries: Iterable[Event]) -> None:
    for event in recoveries:
        lost = set(event.get("workers") or [])
        may = [d for d in found if d.time <= _time(event) and lost & d.hits() and d.pause_ms is None]
        whose = min(may, key=lambda d: "during=" in d.fault, default=None)  # those still wait for their point
        if whose is None:
            continue
        whose.detected = True
        whose.pause_ms = float(event.get("pause_ms") or 0.0)
        if event.get("detect_ms") is not None:
            whose.detect_ms = float(event["detect_ms"])
        whose.replaced_ms = (_time(event) - whose.time) * 1e3
        whose.recomputed, whose.bytes_moved = int(event.get("recomputed") or 0), int(event.get("bytes_moved") or 0)
        whose.rollback = bool(event.get("rollback"))


# --- by kind -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of fault. `detected` of `hit`: of those that hit somebody."""

    kind: str
    count: int
    hit: int
    detected: int
    detect_ms: tuple[float, float] | None  # median and 99th percentile; None: nothing to say
    pause_ms: tuple[float, float] | None
    recomputed: int
    bytes_moved: int


def by_kind(found: Sequence[Disturbance]) -> list[Row]:
    kinds = list(dict.fromkeys(str(kind) for kind in FaultKind if any(d.kind == kind for d in found)))
    return [_row(kind, [d for d in found if d.kind == kind]) for kind in kinds]


def _row(kind: str, of: Sequence[Disturbance]) -> Row:
    return Row(
        kind=kind,
        count=len(of),
        hit=sum(d.detected is not None for d in of),
        detected=sum(d.detected is True for d in of),
        detect_ms=spread([d.detect_ms for d in of if d.detect_ms is not None]),
        pause_ms=spread([d.pause_ms for d in of if d.pause_ms is not None]),
        recomputed=sum(d.recomputed for d in of),
        bytes_moved=sum(d.bytes_moved for d in of),
    )


def spread(values: Sequence[float]) -> tuple[float, float] | None:
    return (percentile(values, 0.5), percentile(values, 0.99)) if values else None


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: a value that occurred."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


# --- how fast ------------------------------------------------------------------------------------------------


def tokens_per_second(records: Sequence[StepRecord]) -> float | None:
    """Committed tokens a second, from the first step's decision to the last one's; None of fewer than two steps."""
    if len(records) < 2 or records[-1].time <= records[0].time:
        return None
    return sum(record.tokens for record in records[1:]) / (records[-1].time - records[0].time)


def _time(event: Event) -> float:
    value = event.get("time")
    return float(value) if isinstance(value, (int, float)) else 0.0
