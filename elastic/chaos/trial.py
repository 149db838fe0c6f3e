"""What `everstep chaos` and `everstep replay` share: a job that is disturbed, an undisturbed one, a verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dataloader.errors import DataError, HostError
from elastic.audit import Check, diff
from elastic.chaos import promises as p
from elastic.chaos.conduct import Conductor, Injection
from elastic.chaos.figures import Disturbance, by_kind, disturbances, tokens_per_second
from elastic.chaos.jobs import until
from elastic.chaos.leftovers import witnessed
from elastic.chaos.promises import Promise
from elastic.chaos.sitting import Sat, Undisturbed, sit
from elastic.chaos.table import shown
from elastic.checks import checks_of
from elastic.config import JobConfig
from elastic.faults import FaultKind, parse_fault
from elastic.record_lines import Event, read_events, read_ledger
from elastic.rundir import RunDirectory, write_atomic
from elastic.watch import Signals
from runtime.protocol import StepRecord

INTERRUPTED = 130
NOTICE_PATIENCE_SECONDS = 20.0  # on a busy machine; a job that ends before that doesn't need who is lost
KILLS = frozenset({FaultKind.KILL_WORKER, FaultKind.KILL_AGENT, FaultKind.KILL_NODE})


@dataclass(frozen=True, slots=True)
class Disturbed:
    """The disturbed job after its end."""

    run: RunDirectory
    sat: Sat
    records: Sequence[StepRecord]
    events: Sequence[Event]
    faults: Sequence[Disturbance]
    left: Sequence[str]
    processes: int

    @property
    def rollbacks(self) -> int:
        return sum(bool(e.get("rollback")) for e in self.events if e.get("kind") == "plan")


def disturb(
    job: JobConfig, conductor: Conductor, injections: Sequence[Injection], signals: Signals, greeting: str
) -> Disturbed:
    """Run the job under the conductor, and look for what it leaves behind."""
    run = RunDirectory(job.run_dir)
    with witnessed() as witness:
        sat = sit(job, conductor, signals, greeting)
        left = witness.left()
    events = read_events(run.events)
    try:
        records = read_ledger(run.ledger)
    except DataError:
        records = []  # which the audit tells
    return Disturbed(run, sat, records, events, disturbances(events, injections), left, witness.seen())


def refuse_to_judge(disturbed: Disturbed) -> None:
    """Raises HostError for a job that failed without being disturbed, or before its first step: that says nothing."""
    outcome = disturbed.sat.outcome
    if not disturbed.records or (outcome.state == "failed" and not disturbed.faults):
        why = outcome.reason or "it ended before its first step"
        raise HostError(f"the job in {shown(disturbed.run.path)} failed before any fault: {why}")


def make_reference(job: JobConfig, steps: int, signals: Signals, greeting: str) -> tuple[RunDirectory, Sat]:
    """The same job, undisturbed, for as many steps."""
    job = until(job, steps)
    return RunDirectory(job.run_dir), sit(job, Undisturbed(), signals, greeting)


def judge(disturbed: Disturbed, reference: Sequence[StepRecord], stuck: str) -> list[Promise]:
    """The promises, each with what was found."""
    checks: list[Check] = list(checks_of(disturbed.run))
    end = max((float(e["time"]) for e in disturbed.events), default=0.0)
    undetected = [d for d in disturbed.faults if d.detected is False and must_be_noticed(d, disturbed.faults, end)]
    return [
        p.same_bits(diff(disturbed.records, reference)),
        p.exactly_once(checks),
        p.constant_batch(checks),
        p.no_step_lost(disturbed.faults, disturbed.rollbacks),
        p.no_single_point(disturbed.sat.outcome, stuck, undetected),
        p.nothing_left(disturbed.left, disturbed.processes),
    ]


def must_be_noticed(this: Disturbance, faults: Sequence[Disturbance], end: float) -> bool:
    """A member that is killed or frozen for good, unless another fault had it first or the job came to its end.
    Who sends nothing to anyone doesn't come to the point that a fault waits for."""
    before = [d for d in faults if d is not this and d.time <= this.time and set(d.victims) & set(this.victims)]
    fault = parse_fault(this.fault)
    for_good = fault.kind in KILLS or (fault.kind is FaultKind.FREEZE_WORKER and fault.seconds is None)
    return for_good and fault.during is None and this.whole and not before and end > this.time + NOTICE_PATIENCE_SECONDS


@dataclass(slots=True)
class Report:
    """What a trial writes down, and says in the end."""

    what: Mapping[str, Any]
    rates: tuple[float | None, float | None]  # committed tokens a second: disturbed, undisturbed
    promises: Sequence[Promise] = ()
    faults: Sequence[Disturbance] = ()
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def goodput(self) -> float | None:
        ours, theirs = self.rates
        return None if ours is None or not theirs else ours / theirs

    @property
    def kept(self) -> bool:
        return all(promise.kept for promise in self.promises)

    def broken(self) -> str:
        return ", ".join(promise.name for promise in self.promises if not promise.kept)

    def plain(self) -> dict[str, Any]:
        return {
            **self.what,
            "verdict": "kept" if self.kept else "broken",
            "promises": [{**asdict(promise), "kept": promise.kept} for promise in self.promises],
            "tokens_per_second": self.rates[0],
            "undisturbed_tokens_per_second": self.rates[1],
            "goodput": self.goodput,
            "by_kind": [asdict(row) for row in by_kind(self.faults)],
            "faults": [disturbance.plain() for disturbance in self.faults],
            **self.more,
        }


def write_report(run: RunDirectory, name: str, report: Report) -> None:
    write_atomic(run.path / name, (json.dumps(report.plain(), indent=1) + "\n").encode(), durable=False)


def rates(disturbed: Disturbed, reference: Sequence[StepRecord]) -> tuple[float | None, float | None]:
    """Over the steps that both have."""
    common = min(len(disturbed.records), len(reference))
    return tokens_per_second(disturbed.records), tokens_per_second(reference[:common])
