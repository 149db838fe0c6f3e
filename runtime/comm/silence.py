"""When a link is silent for too long: a host that vanished without a word, a network that drops everything. Pure.

Asked is the peer's *kernel*, which answers for a process that computes, waits or is stopped: none of these is a reason
to drop a link. (A stopped process is its agent's business.) The kernel's own time-outs don't do: keep-alive counts in
whole seconds and only while nothing is in flight, and TCP_USER_TIMEOUT also ends a link whose living peer reads nothing
for a while because it reduces a large shard.

    heard    the number of segments that have come, as the kernel counts them: any change is a sign of life
    asked    something is on its way that must be answered: data, a probe of a closed window, or a pulse sent for it

Only time in which this process was looking counts: whoever was stopped itself, or computed for long, takes up where
it was, and first sees what has come meanwhile.
"""

from __future__ import annotations

LOOKS = 6  # while a link may be silent
LONGEST_LOOK = 2.0  # intervals; what a later look is late by was spent elsewhere


class Silence:
    """Of one link. `limit_seconds`: of silence, for half of which at least an answer was due."""

    __slots__ = ("_asked_seconds", "_heard", "_limit_seconds", "seconds")

    def __init__(self, limit_seconds: float) -> None:
        self.seconds = 0.0
        self._asked_seconds = 0.0
        self._limit_seconds = limit_seconds
        self._heard: int | None = None

    @property
    def too_long(self) -> bool:
        return self.seconds >= self._limit_seconds and self._asked_seconds >= self._limit_seconds / 2

    def look(self, elapsed_seconds: float, heard: int, asked: bool) -> None:
        """`elapsed_seconds` since the last look."""
        if heard != self._heard:
            self._heard, self.seconds, self._asked_seconds = heard, 0.0, 0.0
            return
        counted = min(elapsed_seconds, self._limit_seconds / LOOKS * LONGEST_LOOK)
        self.seconds += counted
        if asked:
            self._asked_seconds += counted
