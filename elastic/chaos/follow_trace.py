"""The conductor of `everstep replay`: nodes come and go as a trace says. Pure.

It compares what the trace wants with who is there and who is on the way, again and again: a node takes seconds to come
up, and a compressed trace may have taken it back by then.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from elastic.chaos.availability import Availability
from elastic.chaos.conduct import SETTLE_PATIENCE_SECONDS, Injection
from elastic.chaos.standing import Standing
from elastic.faults import Fault, FaultKind

COMING_PATIENCE_SECONDS = 60.0  # for a node that was asked for; then another is


@dataclass(slots=True)
class TraceFollower:
    """`notice_seconds`: what a node is told before it goes; 0: it goes without a word."""

    availability: Availability
    notice_seconds: float
    injections: list[Injection] = field(default_factory=list)
    stuck: str = ""
    _seen: set[int] = field(default_factory=set)
    _going: set[int] = field(default_factory=set)  # told to go, or killed
    _coming: deque[float] = field(default_factory=deque)  # when each was asked for
    _asked_at: float = 0.0
    _ended_step: int | None = None

    def turn(self, now: float, standing: Standing) -> Fault | None:
        if now >= self.availability.seconds:
            return None
        here = self._here(now, standing)
        wanted = self.availability.lowest(now, now + self.notice_seconds)  # a notice comes before the node goes
        if len(here) + len(self._coming) < wanted:
            return self._ask(now, Fault(FaultKind.ADD_NODE), standing)
        if len(here) > wanted:
            return self._ask(now, self._leave(min(here, key=lot)), standing)
        return None

    def answered(self, answer: str, time: float) -> None:
        last = self.injections[-1]
        last.answer, last.time = answer, time
        if last.kind == FaultKind.ADD_NODE and last.done:
            self._coming.append(self._asked_at)

    def over(self, now: float, standing: Standing) -> bool:
        """At the trace's end, once it is plain that the job goes on; where no node is left, at once."""
        if now < self.availability.seconds:
            return False
        if self.availability.at(now) == 0:
            return True
        self._ended_step = standing.step if self._ended_step is None else self._ended_step
        if standing.state in ("training", "replaying") and standing.step > self._ended_step:
            return True
        if now > self.availability.seconds + SETTLE_PATIENCE_SECONDS:
            self.stuck = (
                f"{SETTLE_PATIENCE_SECONDS:.0f} s after the trace's end the job is still {standing.state} at step"
                f" {standing.step} with {len(standing.nodes())} nodes"
            )
            return True
        return False

    def _here(self, now: float, standing: Standing) -> list[int]:
        """Nodes that are there and were not told to go; new ones are no longer on the way."""
        there = set(standing.nodes())
        new = there - self._seen if self._seen else set()
        for _ in range(min(len(new), len(self._coming))):
            self._coming.popleft()
        while self._coming and now > self._coming[0] + COMING_PATIENCE_SECONDS:
            self._coming.popleft()
        self._seen |= there
        return sorted(there - self._going)

    def _leave(self, node: int) -> Fault:
        self._going.add(node)
        if self.notice_seconds > 0:
            return Fault(FaultKind.PREEMPT_NODE, node, seconds=self.notice_seconds)
        return Fault(FaultKind.KILL_NODE, node)

    def _ask(self, now: float, fault: Fault, standing: Standing) -> Fault:
        self._asked_at = now
        self.injections.append(Injection(now, str(fault), str(fault.kind), victims=tuple(standing.on(fault.target))))
        return fault


def lot(node: int) -> float:
    """Which of several nodes goes first: any, but the same one every time."""
    return random.Random(node).random()
