"""How long a micro-batch takes: measured, and made longer where that is asked for. The compute thread's own.

Two ways to make it longer:

    shortest_seconds     train.pad_micro_batch_seconds, for benchmarks: what a micro-batch lacks of it is slept, so on a
                         machine with fewer cores than workers more workers still mean more speed
    slow(factor, ...)    an injected fault: a micro-batch takes so many times as long; the rest is slept as well
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Brake:
    """`slow` comes from another thread: one tuple, replaced as a whole."""

    def __init__(
        self,
        shortest_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._shortest, self._clock, self._sleep = shortest_seconds, clock, sleep
        self._slowed = (1.0, 0.0)  # factor, until when

    def slow(self, factor: float, seconds: float | None) -> None:
        self._slowed = (factor, float("inf") if seconds is None else self._clock() + seconds)

    def end(self, begun: float) -> float:
        """A micro-batch that began then has been computed: wait until it is to be over; what it took in all."""
        now = self._clock()
        factor, until = self._slowed
        wanted = max(now - begun, self._shortest) * (factor if now < until else 1.0)
        if (rest := wanted - (now - begun)) > 0.0:
            self._sleep(rest)
        return self._clock() - begun
