"""`everstep replay`: a job on nodes that come and go as a trace says, and what it committed of what could have been.

ideal       the nodes there were at each moment (the area under the trace) x the tokens a second of one node,
            measured on the undisturbed run of the same steps; nodes that come up take no time in it
committed   the tokens of the steps that were decided within the trace's time
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dataloader.errors import ConfigError, HostError, UsageError
from elastic.chaos import table
from elastic.chaos.availability import Availability, compress, read_trace
from elastic.chaos.figures import by_kind, tokens_per_second
from elastic.chaos.follow_trace import TraceFollower
from elastic.chaos.jobs import place, ready
from elastic.chaos.table import shown
from elastic.chaos.trial import (
    INTERRUPTED,
    Disturbed,
    Report,
    disturb,
    judge,
    make_reference,
    rates,
    refuse_to_judge,
    write_report,
)
from elastic.config import JobConfig, load_job, parse_job
from elastic.record_lines import read_ledger
from elastic.rundir import RunDirectory
from elastic.view import counted
from elastic.watch import Signals, complain
from runtime.protocol import StepRecord

REPORT = "replay.json"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The command line."""

    trace: Path
    job: Path
    settings: Sequence[str]
    tick_seconds: float
    nodes: int | None
    part: tuple[int, int] | None
    notice_seconds: float
    reference: Path | None


def wanted_of(arguments: argparse.Namespace) -> Wanted:
    a = arguments
    return Wanted(a.trace, a.job, a.set, a.tick, a.nodes, a.ticks, a.notice, a.reference)


def replay(wanted: Wanted) -> int:
    """Run it all; the exit code. Raises what can be refused before anything is started."""
    availability = availability_of(wanted)
    base = load_job(wanted.job, wanted.settings)
    job = sized(base, availability.first, availability.peak, f"-replay-{wanted.trace.stem}")
    reference = sized(base, availability.peak, availability.peak, f"-replay-{wanted.trace.stem}-reference")
    job, reference, there = ready(job, reference, wanted.reference)
    with Signals() as signals:
        return _trial(wanted, availability, job, reference, there, signals)


def availability_of(wanted: Wanted) -> Availability:
    """Raises DataError or UsageError."""
    trace = read_trace(wanted.trace)
    if wanted.part is not None:
        first, end = wanted.part
        if not first < end <= trace.ticks:
            raise UsageError(f"--ticks {first}:{end}: {wanted.trace} has the ticks 0:{trace.ticks}")
        trace = trace.part(first, end)
    return compress(trace, wanted.tick_seconds, wanted.nodes)


def sized(base: JobConfig, nodes: int, peak: int, suffix: str) -> JobConfig:
    """The job, begun on so many nodes, and without faults of its own. Raises ConfigError where the peak doesn't fit."""
    workers = peak * base.cluster.workers_per_node
    if workers > base.train.logical_ranks:
        raise ConfigError(
            f"train.logical_ranks: {base.train.logical_ranks} is fewer than the {workers} workers of {peak} nodes; "
            "set it to that or more, or replay on fewer with --nodes"
        )
    given = place(base, suffix, ()).model_dump(mode="json")
    given["cluster"]["nodes"] = nodes
    given["cluster"]["min_workers"] = 1
    return parse_job(given, "replay")


def _trial(
    wanted: Wanted,
    availability: Availability,
    job: JobConfig,
    reference: JobConfig,
    there: RunDirectory | None,
    signals: Signals,
) -> int:
    conductor = TraceFollower(availability, wanted.notice_seconds)
    disturbed = disturb(job, conductor, conductor.injections, signals, _greeting(wanted, availability, job, there))
    if disturbed.sat.interrupted:
        complain(f"interrupted, so nothing was judged; the run is in {shown(disturbed.run.path)}")
        return INTERRUPTED
    refuse_to_judge(disturbed)
    if there is None:
        steps = len(disturbed.records)
        greeting = f"2 of 2: the same {counted(steps, 'step')} on {counted(availability.peak, 'node')}, undisturbed"
        there, sat = make_reference(reference, steps, signals, f"{greeting}, into {shown(reference.run_dir)}")
        if sat.interrupted:
            complain(f"interrupted, so nothing was judged; the run is in {shown(disturbed.run.path)}")
            return INTERRUPTED
        if sat.outcome.state == "failed":
            raise HostError(f"the undisturbed run failed, so there is nothing to compare with: {sat.outcome.reason}")
    records = read_ledger(there.ledger)
    share = Share.of(disturbed, availability, records, job.cluster.workers_per_node)
    what = _what(wanted, availability, disturbed, there)
    report = Report(what, rates(disturbed, records), judge(disturbed, records, conductor.stuck), disturbed.faults)
    report.more = {"ideal": share.plain()}
    write_report(disturbed.run, REPORT, report)
    show(report, disturbed, availability, share)
    return 0 if report.kept else 1


@dataclass(frozen=True, slots=True)
class Share:
    """What was committed of the ideal. `seconds`: as far into the trace as the job went."""

    seconds: float
    node_seconds: float
    tokens_per_node_second: float | None
    committed: int

    @staticmethod
    def of(
        disturbed: Disturbed, availability: Availability, reference: Sequence[StepRecord], workers_per_node: int
    ) -> Share:
        began = disturbed.sat.began or 0.0
        ended = disturbed.records[-1].time if disturbed.sat.stopped_at is None else disturbed.sat.stopped_at
        seconds = min(availability.seconds, max(0.0, ended - began))
        within = [r for r in disturbed.records if began < r.time <= began + seconds]
        per_node = speed_of_a_node(reference, workers_per_node)
        return Share(seconds, availability.until(seconds).node_seconds(), per_node, sum(r.tokens for r in within))

    @property
    def ideal(self) -> float | None:
        return None if self.tokens_per_node_second is None else self.node_seconds * self.tokens_per_node_second

    @property
    def share(self) -> float | None:
        return self.committed / self.ideal if self.ideal else None

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": self.ideal, "share": self.share}


def speed_of_a_node(reference: Sequence[StepRecord], workers_per_node: int) -> float | None:
    """Committed tokens a second, by the undisturbed run, whatever its number of workers."""
    rate = tokens_per_second(reference)
    return None if rate is None else rate / median(r.workers for r in reference) * workers_per_node


def _greeting(wanted: Wanted, availability: Availability, job: JobConfig, there: RunDirectory | None) -> str:
    number = "1 of 2: " if there is None else ""
    minutes, none = availability.seconds / 60.0, availability.times_none
    nodes = f"{availability.first} at first, {availability.peak} at most, none {none} times"
    greeting = f"{number}{wanted.trace.name} in {minutes:.1f} minutes, nodes: {nodes}; into {shown(job.run_dir)}"
    if none and not job.checkpoint.full_every and not wanted.notice_seconds:
        greeting += "\nnote: checkpoint.full_every is 0, so whenever all nodes are gone the job begins anew"
    return greeting


def _what(wanted: Wanted, availability: Availability, disturbed: Disturbed, there: RunDirectory) -> dict[str, Any]:
    return {
        "trace": str(wanted.trace),
        "tick_seconds": wanted.tick_seconds,
        "notice_seconds": wanted.notice_seconds,
        "first_nodes": availability.first,
        "peak_nodes": availability.peak,
        "times_none": availability.times_none,
        "seconds": availability.seconds,
        "run": str(disturbed.run.path),
        "reference": str(there.path),
        "state": disturbed.sat.outcome.state,
        "steps": len(disturbed.records),
        "ended_early": disturbed.sat.stopped_at is None,
        "rollbacks": disturbed.rollbacks,
        "recomputed": recomputed(disturbed),
        "left": list(disturbed.left),
    }


def recomputed(disturbed: Disturbed) -> int:
    """Micro-batches that were computed twice, as the job counted them."""
    ends = [event for event in disturbed.events if event.get("kind") == "run_ended"]
    return int(ends[-1].get("recomputed") or 0) if ends else 0


def show(report: Report, disturbed: Disturbed, availability: Availability, share: Share) -> None:
    table.show(
        *([table.faults_table(by_kind(disturbed.faults))] if disturbed.faults else []),
        table.facts_table(facts(disturbed, availability, share)),
        table.promises_table(report.promises),
        table.verdict_text(verdict(report, disturbed, share), report.kept),
    )


def facts(disturbed: Disturbed, availability: Availability, share: Share) -> list[tuple[str, str]]:
    ideal = "-" if share.ideal is None else f"{share.ideal:,.0f} tokens"
    per_node = "-" if share.tokens_per_node_second is None else f"{share.tokens_per_node_second:,.0f} tokens/s a node"
    of_ideal = "" if share.share is None else f", {share.share:.3f} of the ideal"
    rows = [
        (
            "trace",
            f"{share.seconds:.0f} s, {share.node_seconds:.0f} node-seconds, none {availability.times_none} times",
        ),
        ("committed", f"{share.committed:,} tokens in {counted(len(disturbed.records), 'step')}{of_ideal}"),
        ("ideal", f"{ideal} ({per_node})"),
        ("from a checkpoint", f"{disturbed.rollbacks} times"),
        ("computed twice", counted(recomputed(disturbed), "micro-batch").replace("micro-batchs", "micro-batches")),
    ]
    if disturbed.sat.outcome.state == "done" and disturbed.sat.stopped_at is None:
        rows.append(("ended before", "the job came to its last step before the trace did; raise train.steps"))
    return rows


def verdict(report: Report, disturbed: Disturbed, share: Share) -> str:
    """The one clear line."""
    if not report.kept:
        return f"BROKEN: {report.broken()}; see {shown(disturbed.run.path)}"
    of_ideal = "" if share.share is None else f", {share.share:.3f} of the ideal"
    early = "; the job ended before the trace" if disturbed.sat.stopped_at is None else ""
    return f"kept: {share.committed:,} tokens{of_ideal}, and every promise held{early}"
