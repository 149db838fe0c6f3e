"""Many seeds, in several processes. Outcomes come in the order of the seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.sim.bugs import planted
from tests.sim.doubles import double_world
from tests.sim.world import Outcome, World

CHUNK = 10  # seeds handed to a process at a time


def world_of(seed: int, tracing: bool, double: bool) -> World:
    return double_world(seed, tracing) if double else World(seed, tracing)


def run_seed(seed: int, plant: str | None = None, tracing: bool = False, double: bool = False) -> Outcome:
    with planted(plant):
        return world_of(seed, tracing, double).run()


def run_chunk(seeds: Sequence[int], plant: str | None, double: bool) -> list[Outcome]:
    with planted(plant):
        return [world_of(seed, False, double).run() for seed in seeds]


def run_seeds(
    seeds: Sequence[int], plant: str | None = None, processes: int = 2, double: bool = False
) -> Iterator[Outcome]:
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    if processes < 2:
        for chunk in chunks:
            yield from run_chunk(chunk, plant, double)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        try:
            for outcomes in pool.map(run_chunk, chunks, [plant] * len(chunks), [double] * len(chunks)):
                yield from outcomes
        finally:
            pool.shutdown(cancel_futures=True)


def first_caught(plant: str, known: Sequence[int], most: int, double: bool = False) -> tuple[int, Outcome] | None:
    """(runs that it took, the outcome) of the first seed that catches a planted bug: known ones first, then from 0."""
    with planted(plant):
        for number, seed in enumerate([*known, *range(most)], start=1):
            outcome = world_of(seed, False, double).run()
            if outcome.violation is not None:
                return number, outcome
    return None
