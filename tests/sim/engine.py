"""Simulated time: a queue of calls, ordered by when they are due and, at the same moment, by when they were made."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any


class Engine:
    """``random`` decides everything that isn't decided by the code under test."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        self._made += 1
        heappush(self._queue, (time, self._made, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, call, *arguments)

    def step(self) -> bool:
        """Do the next call. False if there is none."""
        if not self._queue:
            return False
        self.now, _, call, arguments = heappop(self._queue)
        self.events += 1
        call(*arguments)
        return True

    def jitter(self, seconds: float) -> float:
        """Something around so many seconds."""
        return seconds * (0.3 + 1.4 * self.random.random())
