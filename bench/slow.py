"""What a slow worker costs, before and after work has moved away from it; and that it comes back.

Four workers, one of which becomes three times as slow in mid-run and recovers later, all in one run. Every micro-batch
is padded to 200 ms of wall clock (`train.pad_micro_batch_seconds`: a tiny model, the rest is slept), since on a machine
with fewer cores than workers they would else all be slow together. Figures are medians over steps. What is asked for:
compared with the run's undisturbed steps, no longer than the best of all maps of logical ranks to workers would be.

    python -m bench.slow [--steps N]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench.local_job import LocalJob, local_job
from bench.results import ROOT, Result, report
from dataloader.corpus import prepare
from elastic.balance import makespan, share
from elastic.config import JobConfig, load_job

WORKERS, RANKS = 4, 12  # one micro-batch a logical rank
MICRO_BATCH_SECONDS = 0.2
SLOW, FACTOR = 3, 3.0
STEPS = 12  # measured in each phase
WARM_STEPS = 3
TIMEOUT_SECONDS = 300.0
IDEAL_TARGET = 1.15  # times what is ideal, at most
SETTINGS = (
    "cluster.nodes=2",
    "cluster.workers_per_node=2",
    "cluster.standbys=0",
    f"train.global_batch={RANKS}",
    "train.micro_batch=1",
    f"train.logical_ranks={RANKS}",
    f"train.pad_micro_batch_seconds={MICRO_BATCH_SECONDS}",
    "train.steps=100000",
    "model.hidden_size=32",
    "model.intermediate_size=96",
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=2",
    "balance.every=10",
    "balance.patience_seconds=2.0",
)


def main() -> bool:
    parser = argparse.ArgumentParser(prog="python -m bench.slow", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"measured in each phase ({STEPS})")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        job = make_job(Path(name))
        with local_job(job, Path(name) / "run") as running:
            return report(measure(running, options.steps))


def make_job(directory: Path) -> JobConfig:
    job = load_job(ROOT / "examples" / "stdlib.yaml", [*SETTINGS, f"run.dir={directory}/run"])
    data = job.data.model_copy(update={"path": prepare(job.data, lambda *_: None), "source": None})
    return job.model_copy(update={"data": data})


def measure(job: LocalJob, steps: int) -> list[Result]:
    even = steps_of(job, WARM_STEPS, steps)
    slowed_at = inject(job, f"slow-worker={SLOW},factor={FACTOR:g}")
    moved = changed(job, 1)
    slow = seconds_between(job, slowed_at + 2, last_plan_step(job) - 1)
    rebalanced = steps_of(job, last_plan_step(job) + 2, steps)
    moved_after = last_plan_step(job) - slowed_at
    recovered_at = inject(job, f"slow-worker={SLOW},factor=1")
    back = changed(job, 2)
    back_after = last_plan_step(job) - recovered_at
    recovered = steps_of(job, last_plan_step(job) + 2, steps)
    return compare(
        {"undisturbed": even, "slow": slow, "rebalanced": rebalanced, "recovered": recovered},
        {"change": moved, "change_back": back, "steps_until": moved_after, "steps_until_back": back_after},
    )


# --- the run ----------------------------------------------------------------------------------------------------------


def inject(job: LocalJob, fault: str) -> int:
    """The step that it was injected in."""
    job.inject(fault)
    return max(job.records) + 1


def changed(job: LocalJob, count: int) -> Mapping[str, Any]:
    """What the so many-th change of the map says of itself, once it is there."""
    job.until(lambda: len(events(job, "rebalance")) >= count, TIMEOUT_SECONDS)
    return events(job, "rebalance")[count - 1]


def events(job: LocalJob, kind: str) -> list[Mapping[str, Any]]:
    return [fields for name, fields in job.events if name == kind]


def last_plan_step(job: LocalJob) -> int:
    return int(events(job, "plan")[-1]["step"])


def steps_of(job: LocalJob, first: int, count: int) -> list[float]:
    job.until(lambda: first + count - 1 in job.records, TIMEOUT_SECONDS)
    return seconds_between(job, first, first + count - 1)


def seconds_between(job: LocalJob, first: int, last: int) -> list[float]:
    """Of the steps [first, last], from the end of the one before."""
    times = [job.records[step].time for step in range(first - 1, last + 1)]
    return [b - a for a, b in pairwise(times)]


# --- figures ----------------------------------------------------------------------------------------------------------


def compare(phases: Mapping[str, list[float]], detail: Mapping[str, Any]) -> list[Result]:
    usual = dict.fromkeys(range(WORKERS), MICRO_BATCH_SECONDS)
    slowed = {**usual, SLOW: MICRO_BATCH_SECONDS * FACTOR}
    even = dict.fromkeys(range(WORKERS), RANKS // WORKERS)
    best = {
        "undisturbed": makespan(even, usual),
        "slow": makespan(even, slowed),
        "rebalanced": makespan(share(RANKS, range(WORKERS), {SLOW: FACTOR}), slowed),
        "recovered": makespan(even, usual),
    }
    figure = {phase: median(seconds) for phase, seconds in phases.items()}
    shape = {
        "workers": WORKERS,
        "logical_ranks": RANKS,
        "padded_micro_batch_seconds": MICRO_BATCH_SECONDS,
        "factor": FACTOR,
        "ideal_seconds": best,
        "values": {phase: [round(value, 4) for value in seconds] for phase, seconds in phases.items()},
        **detail,
    }
    case = f"one of {WORKERS} workers {FACTOR:g} x slower (padded to {MICRO_BATCH_SECONDS * 1e3:.0f} ms)"

    def row(phase: str, beside: str, target: float | None, detail: dict[str, Any]) -> Result:
        """Its ratio to another phase; the target is for its ratio to what would be ideal."""
        ideal = figure["undisturbed"] * best[phase] / best["undisturbed"]
        off = figure[phase] / ideal
        words = "" if target is None else f"<= {target} x ideal {ideal:.3f} s (is {off:.3f})"
        met = None if target is None else off <= target
        return Result(f"{case}: {phase}", figure[phase], "s", figure[phase] / figure[beside], words, met, detail)

    return [
        row("undisturbed", "undisturbed", None, shape),
        row("slow", "undisturbed", None, {"beside": "undisturbed"}),
        row("rebalanced", "slow", IDEAL_TARGET, {"beside": "slow, not rebalanced"}),
        row("recovered", "undisturbed", IDEAL_TARGET, {"beside": "undisturbed"}),
    ]


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
