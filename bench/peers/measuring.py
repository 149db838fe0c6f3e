"""One job of one system under one schedule of kills, from outside; and the figures of it."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.peers.accounting import (
    Deviation,
    Step,
    deviation,
    lost_and_repeated,
    pauses,
    rate,
    uneven_steps,
)
from bench.peers.everstep_job import EverstepJob
from bench.peers.shape import GLOBAL_BATCH, MICRO_BATCH_SECONDS, MICRO_BATCHES_PER_WORKER, WARM_STEPS, WORKERS
from bench.peers.systems import PeerJob, Running, SetUp
from bench.peers.venvs import venv

START_SECONDS = 600.0  # for all of them
POLL_SECONDS = 0.25
SEED = 15  # of the victims
USUAL_SECONDS = MICRO_BATCH_SECONDS * MICRO_BATCHES_PER_WORKER


@dataclass(frozen=True, slots=True)
class Job:
    """What a job left behind."""

    begin: float
    end: float
    kills: tuple[float, ...]
    missed_kills: int  # when they were due no worker was up
    steps: tuple[Step, ...]  # from its start to `end`
    commits: tuple[float, ...]
    samples_in_vain: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One row: a set-up under one interval. None for the interval: undisturbed."""

    system: str
    variant: str
    interval: float | None
    samples_per_second: float
    goodput: float  # samples per second, against the same set-up undisturbed
    kills: int
    missed_kills: int
    pauses: tuple[float, ...]
    lost: int
    repeated: int
    in_vain: int
    steps: int
    uneven_steps: int
    deviation: Deviation
    progress: tuple[tuple[float, float], ...]  # (seconds since the start, samples in the model), for the plot


def run(set_up: SetUp, interval: float | None, seconds: float, keep: Path | None = None) -> Job:
    """`keep`: a directory to make and to leave."""
    with _job(set_up, keep) as running:
        _wait_until_warm(running)
        begin = time.time()
        kills, missed = _kill_on_schedule(running, begin, interval, seconds)
        _sleep_until(begin + seconds)
        end = begin + seconds
        running.stop()
        return Job(
            begin,
            end,
            tuple(kills),
            missed,
            tuple(running.steps(end)),
            tuple(running.commit_times(end)),
            running.samples_in_vain(end),
        )


@contextmanager
def _job(set_up: SetUp, keep: Path | None) -> Iterator[Running]:
    bin_directory = venv(set_up.system.lower().replace(" ", "-"), set_up.packages) if set_up.packages else Path()
    with tempfile.TemporaryDirectory(prefix="evb-", ignore_cleanup_errors=True) as name:  # short: sockets lie in it
        directory = keep or Path(name)
        directory.mkdir(parents=True, exist_ok=True)
        running = PeerJob(set_up, bin_directory, directory) if set_up.packages else EverstepJob(directory)
        try:
            yield running
        except BaseException:
            running.stop()
            raise


def _wait_until_warm(running: Running) -> None:
    deadline = time.monotonic() + START_SECONDS
    while running.steps_done() < WARM_STEPS or len(running.workers()) < WORKERS:
        if time.monotonic() > deadline:
            raise SystemExit(f"{WARM_STEPS} steps of {WORKERS} workers didn't come within {START_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)


def _kill_on_schedule(
    running: Running, begin: float, interval: float | None, seconds: float
) -> tuple[list[float], int]:
    """In the middle of each interval, so that each has what follows its kill. The same slots in every system."""
    rng, kills, missed = random.Random(SEED), [], 0
    for number in range(int(seconds // interval) if interval else 0):
        assert interval is not None
        slot = rng.randrange(WORKERS)
        _sleep_until(begin + (number + 0.5) * interval)
        living = running.workers()
        order = [(slot + more) % WORKERS for more in range(WORKERS)]
        victim = next((living[which] for which in order if which in living), None)
        if victim is not None and victim.kill():
            kills.append(time.time())
        else:
            missed += 1
    return kills, missed


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


def figures(set_up: SetUp, interval: float | None, job: Job, undisturbed: Job) -> Figures:
    usual = _usual(undisturbed)
    lost, repeated = lost_and_repeated(job.steps, set_up.streams)
    own, other = (rate(one.steps, one.begin, one.end) for one in (job, undisturbed))
    return Figures(
        system=set_up.system,
        variant=set_up.variant,
        interval=interval,
        samples_per_second=own,
        goodput=own / other,
        kills=len(job.kills),
        missed_kills=job.missed_kills,
        pauses=tuple(round(pause, 3) for pause in pauses(job.commits, job.kills, job.end, usual)),
        lost=lost,
        repeated=repeated,
        in_vain=job.samples_in_vain,
        steps=len(job.steps),
        uneven_steps=uneven_steps(job.steps, GLOBAL_BATCH),
        deviation=deviation(job.steps, undisturbed.steps),
        progress=_progress(job),
    )


def _usual(undisturbed: Job) -> float:
    times = [time for time in undisturbed.commits if time >= undisturbed.begin]
    return median(after - before for before, after in pairwise(times)) if len(times) > 1 else 1.0


def _progress(job: Job) -> tuple[tuple[float, float], ...]:
    """At most some hundred points."""
    total, points = 0, []
    for step in job.steps:
        if step.time >= job.begin:
            total += len(step.samples)
            points.append((round(step.time - job.begin, 2), float(total)))
    return (*points[:: max(1, len(points) // 200)], (job.end - job.begin, float(total)))
