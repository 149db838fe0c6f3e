"""Time as production reads it, while a simulation runs: monotonic for all, wall clocks that need not agree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import runtime.driver
import runtime.links
from tests.sim.engine import Engine

WALL_START_SECONDS = 1.7e9
MODULES: tuple[Any, ...] = (runtime.driver, runtime.links)  # all production code that asks for the time itself


class Clock:
    """Stands in for the `time` module in MODULES. `ahead`: of the node whose code is running right now."""

    engine: Engine | None = None
    ahead_seconds = 0.0

    def monotonic(self) -> float:
        assert self.engine is not None
        return self.engine.now

    def time(self) -> float:
        return WALL_START_SECONDS + self.ahead_seconds + self.monotonic()


CLOCK = Clock()


@contextmanager
def simulated_time(engine: Engine) -> Iterator[None]:
    real = [module.time for module in MODULES]
    for module in MODULES:
        module.time = CLOCK
    CLOCK.engine, CLOCK.ahead_seconds = engine, 0.0
    try:
        yield
    finally:
        for module, time in zip(MODULES, real, strict=True):
            module.time = time
        CLOCK.engine = None
