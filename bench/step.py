"""Steady state: seconds per step of four workers with backups and digests on, beside plain DDP.

Both train the demo's model on the same micro-batches with one thread per worker. They take turns in blocks, within
one run, each waiting without work while the other runs; a block's first steps don't count, nor does the start-up.
Figures are medians over all steps that count. The ratio is of tokens per second: the median, over pairs of neighbouring
blocks, of the ratio of their medians, which a machine that grows busier meanwhile disturbs least.

    python -m bench.step [--blocks N] [--steps N] [--only 512|128]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.local_job import LocalJob, local_job
from bench.plain_ddp import PlainDdp, plain_ddp
from bench.results import ROOT, Result, report
from dataloader.corpus import prepare
from elastic.config import JobConfig, dump_job, load_job

WARM_STEPS = 3  # at the head of each block, not counted
BLOCKS = 5
TARGET = 0.9
TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    steps: int  # in a block
    settings: tuple[str, ...]  # beside the demo's job


# By tokens a worker and step. 128 is one sample a worker, so four logical ranks do.
CASES = {
    512: Case(15, ("train.global_batch=16", "train.micro_batch=2", "train.logical_ranks=8")),
    128: Case(25, ("train.global_batch=4", "train.micro_batch=1", "train.logical_ranks=4")),
}


@dataclass(slots=True)
class Side:
    """What one of the two has shown so far."""

    blocks: list[list[float]] = field(default_factory=list)  # seconds of every step that counts
    cpu_seconds: list[float] = field(default_factory=list)  # per step of all its processes, by block
    phases: dict[str, list[float]] = field(default_factory=dict)

    @property
    def seconds(self) -> list[float]:
        return [seconds for block in self.blocks for seconds in block]

    def figures(self) -> dict[str, Any]:
        return {
            "median_seconds_by_block": [round(median(block), 5) for block in self.blocks],
            "median_seconds": round(median(self.seconds), 5),
            "mean_seconds": round(mean(self.seconds), 5),
            "cpu_seconds_per_step": round(median(self.cpu_seconds), 5),
            "phases": {name: round(median(values), 5) for name, values in self.phases.items()},
        }


def main() -> bool:
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=BLOCKS, help=f"of each side ({BLOCKS})")
    parser.add_argument("--steps", type=int, help=f"in a block, {WARM_STEPS} of them not counted (15, 25)")
    parser.add_argument("--only", type=int, choices=CASES, help="tokens a worker and step")
    options = parser.parse_args()
    results: list[Result] = []
    for tokens in [options.only] if options.only else CASES:
        results += measure(tokens, options.blocks, options.steps or CASES[tokens].steps)
    return report(results)


def measure(tokens: int, blocks: int, steps: int) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        directory = Path(name)
        job = make_job(tokens, blocks * steps, directory)
        job_file = directory / "job.yaml"
        job_file.write_text(dump_job(job))
        hold_at = frozenset(range(0, blocks * steps, steps))
        everstep, ddp = Side(), Side()
        with local_job(job, directory / "run", hold_at) as ours, plain_ddp(job, job_file, directory) as theirs:
            ours.until(lambda: ours.all_parked_at(0), TIMEOUT_SECONDS)
            theirs.steps(1)
            for first in sorted(hold_at):
                run_ours(ours, first, steps, everstep)
                run_theirs(theirs, steps, ddp)
    return compare(tokens, job, everstep, ddp)


def make_job(tokens: int, steps: int, directory: Path) -> JobConfig:
    settings = [*CASES[tokens].settings, "cluster.standbys=0", f"run.dir={directory}/run", f"train.steps={steps + 1}"]
    job = load_job(ROOT / "examples" / "stdlib.yaml", settings)
    data = job.data.model_copy(update={"path": prepare(job.data, lambda *_: None), "source": None})
    return job.model_copy(update={"data": data})


def run_ours(job: LocalJob, first: int, steps: int, side: Side) -> None:
    """Steps [first, first + steps); the next boundary is held, or the job's last step follows, not counted."""
    before = cpu_seconds(job.pids())
    job.release(first)
    last = first + steps - 1
    job.until(lambda: last in job.records, TIMEOUT_SECONDS)
    side.cpu_seconds.append((cpu_seconds(job.pids()) - before) / steps)
    times = [job.records[step].time for step in range(first, last + 1)]
    side.blocks.append([b - a for a, b in pairwise(times)][WARM_STEPS - 1 :])
    for step in range(first + WARM_STEPS, last + 1):
        for name, seconds in job.records[step].phases.items():
            side.phases.setdefault(name, []).append(seconds)


def run_theirs(ddp: PlainDdp, steps: int, side: Side) -> None:
    before = cpu_seconds(ddp.pids())
    seconds = ddp.steps(steps)
    side.cpu_seconds.append((cpu_seconds(ddp.pids()) - before) / steps)
    side.blocks.append(seconds[WARM_STEPS:])


def cpu_seconds(pids: list[int]) -> float:
    """User and system time that these processes have used."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def compare(tokens: int, job: JobConfig, everstep: Side, ddp: Side) -> list[Result]:
    case = f"step, {tokens} tokens a worker"
    pairs = list(zip(ddp.blocks, everstep.blocks, strict=True))
    ratio = median(median(theirs) / median(ours) for theirs, ours in pairs)
    train = job.train
    shape = {
        "workers": job.cluster.workers,
        "global_batch": train.global_batch,
        "micro_batch": train.micro_batch,
        "logical_ranks": train.logical_ranks,
        "seq_len": job.data.seq_len,
        "steps_counted": len(everstep.seconds),
    }
    asked = tokens == 512
    return [
        Result(f"{case}: plain DDP", median(ddp.seconds), "s", detail=shape | ddp.figures()),
        Result(
            f"{case}: Everstep",
            median(everstep.seconds),
            "s",
            ratio,
            f"ratio >= {TARGET}" if asked else "",
            ratio >= TARGET if asked else None,
            shape | everstep.figures(),
        ),
        Result(
            f"{case}: CPU, Everstep",
            median(everstep.cpu_seconds),
            "CPU s a step",
            median(ddp.cpu_seconds) / median(everstep.cpu_seconds),
            detail={"plain_ddp": median(ddp.cpu_seconds)},
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
