"""How far the wall clocks of other hosts are off, by their agents' beats, and times put right by that. Pure.

Nothing is decided by a wall clock; but what a recovery cost is told in times that were seen on several hosts. A beat
says when it was sent, by its host's clock. It takes longer than nothing, so the least difference of the last beats is
that of the clocks, up to what the fastest of them took; unless the newest agree on another, since a clock was set back.
Clocks that agree to a fifth of a second are left as they are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from elastic import messages as m

BEATS = 20
AGREE = 5  # so many of the newest
LEAST_SECONDS = 0.2


class Skews:
    def __init__(self) -> None:
        self._instances: dict[int, str] = {}
        self._seen: dict[int, deque[float]] = {}

    def beat(self, slot: int, instance: str, sent: float, received: float) -> None:
        """A slot's next agent may be on another host, so nothing is known of its clock."""
        if self._instances.get(slot) != instance:
            self._instances[slot] = instance
            self._seen.pop(slot, None)
        seen = self._seen.setdefault(slot, deque(maxlen=BEATS))
        seen.append(received - sent)
        newest = list(seen)[-AGREE:]
        agree = len(newest) == AGREE and max(newest) - min(newest) < LEAST_SECONDS
        if agree and min(newest) - min(seen) >= LEAST_SECONDS:
            self._seen[slot] = deque(newest, BEATS)

    def seconds(self, slot: int) -> float:
        """To be added to a time of that host."""
        least = min(self._seen.get(slot, ()), default=0.0)
        return least if abs(least) >= LEAST_SECONDS else 0.0

    def righted(self, told: m.Told) -> m.Event:
        """What an agent told, with its times by the controller's clock where that host has another."""
        event, off = told.event, self.seconds(told.slot)
        if off:
            match event:
                case m.WorkerExited() | m.LinkLost() | m.Resumed() | m.Killed():
                    return replace(event, time=event.time + off)
                case m.AgentUp(exited=exited):
                    return replace(event, exited=tuple(replace(exit, time=exit.time + off) for exit in exited))
                case m.StepsDecided(records=records):
                    return replace(event, records=tuple(replace(known, time=known.time + off) for known in records))
        return event
