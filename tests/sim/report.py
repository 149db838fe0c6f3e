"""Many seeds at once, and what they say together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

from tests.sim.bugs import planted
from tests.sim.world import Outcome, World

CHUNK = 10


@dataclass
class Report:
    outcomes: int = 0
    events: int = 0
    steps: int = 0
    plans: int = 0
    rollbacks: int = 0
    seconds: float = 0.0
    failed: list[tuple[int, str]] = field(default_factory=list)
    hits: Counter[tuple[str, str]] = field(default_factory=Counter)  # (protocol point, fault)

    def take(self, outcome: Outcome) -> None:
        self.outcomes += 1
        self.events += outcome.events
        self.steps += outcome.steps
        self.plans += outcome.plans
        self.rollbacks += outcome.rollbacks
        self.hits.update(outcome.faults)
        if outcome.violation is not None:
            self.failed.append((outcome.seed, outcome.violation))


def run_seed(seed: int, plant: str | None = None) -> Outcome:
    with planted(plant):
        try:
            return World(seed).run()
        except Exception as error:  # production code that falls over is a failed seed, not a failed simulator
            told = f"{type(error).__name__}: {error}"
            return Outcome(seed, told, 0, 0.0, 0, 0, 0, 0, [])


def run_chunk(seeds: Sequence[int], plant: str | None) -> list[Outcome]:
    return [run_seed(seed, plant) for seed in seeds]


def run_seeds(seeds: Sequence[int], processes: int = 2, plant: str | None = None, first_only: bool = False) -> Report:
    """Run them all; with `first_only` stop soon after the first that fails."""
    report, begun = Report(), time.monotonic()
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        for outcomes in pool.map(partial(run_chunk, plant=plant), chunks):
            for outcome in outcomes:
                report.take(outcome)
            if first_only and report.failed:
                pool.shutdown(cancel_futures=True)
                break
    report.seconds = time.monotonic() - begun
    return report


def coverage_table(report: Report) -> str:
    """Protocol points down, faults across: how often a fault of that kind happened there."""
    points = sorted({point for point, _ in report.hits})
    faults = sorted({fault for _, fault in report.hits})
    width = max(map(len, points), default=0)
    lines = [" " * width + "".join(f"  {fault:>{max(len(fault), 5)}}" for fault in faults)]
    for point in points:
        cells = "".join(f"  {report.hits[point, fault] or '.':>{max(len(fault), 5)}}" for fault in faults)
        lines.append(f"{point:<{width}}{cells}")
    return "\n".join(lines)
