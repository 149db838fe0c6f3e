"""How far the wall clocks of other hosts are off, by their agents' beats, and times put right by that. Pure.

Nothing is decided by a wall clock; but what a recovery cost is told in times that were seen on several hosts. A beat
says when it was sent, by its host's clock. It takes longer than nothing, so the least difference of the last beats is
that of the clocks, up to what the fastest of them took; unless the newest agree on another, since a clock was set back.
Clocks that agree to a fifth of a second are left as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from elastic import messages as m
from runtime.protocol import WorkerId

BEATS = 20
AGREE = 5  # so many of the newest
LEAST_SECONDS = 0.2


class Skews:
    def __init__(self, slot_of: Callable[[WorkerId], int | None]) -> None:
        self._slot_of = slot_of
        self._seen: dict[int, deque[float]] = {}

    def beat(self, slot: int, sent: float, received: float) -> None:
        seen = self._seen.setdefault(slot, deque(maxlen=BEATS))
        seen.append(received - sent)
        newest = list(seen)[-AGREE:]
        agree = len(newest) == AGREE and max(newest) - min(newest) < LEAST_SECONDS
        if agree and min(newest) - min(seen) >= LEAST_SECONDS:
            self._seen[slot] = deque(newest, BEATS)

    def seconds(self, slot: int | None) -> float:
        """To be added to a time of that host."""
        least = min(self._seen.get(-1 if slot is None else slot, ()), default=0.0)
        return least if abs(least) >= LEAST_SECONDS else 0.0

    def righted(self, event: m.Event) -> m.Event:
        """With its times by the controller's clock, where its worker's host has another."""
        match event:
            case m.WorkerExited() | m.LinkLost() | m.Resumed() | m.Killed() if event.worker >= 0:
                if off := self.seconds(self._slot_of(event.worker)):
                    return replace(event, time=event.time + off)
            case m.AgentUp(slot) if off := self.seconds(slot):
                return replace(event, exited=tuple(replace(exit, time=exit.time + off) for exit in event.exited))
            case m.StepsDecided(worker, records) if off := self.seconds(self._slot_of(worker)):
                return replace(event, records=tuple(replace(record, time=record.time + off) for record in records))
        return event
