"""`everstep chaos`: a job through a schedule of faults, the same job undisturbed, and whether all promises held."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataloader.errors import HostError
from elastic.chaos import table
from elastic.chaos.conduct import ScheduledFaults, Size
from elastic.chaos.draw import draw
from elastic.chaos.fault_file import Schedule, read_fault_file
from elastic.chaos.figures import by_kind
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
from elastic.config import JobConfig, load_job
from elastic.record_lines import read_ledger
from elastic.rundir import RunDirectory
from elastic.view import counted
from elastic.watch import Signals, complain

REPORT = "chaos.json"
MTBF_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """The command line. `faults`: a file in place of drawing."""

    job: Path
    settings: Sequence[str]
    seed: int
    minutes: float
    mtbf_seconds: float
    faults: Path | None
    reference: Path | None


def wanted_of(arguments: argparse.Namespace) -> Wanted:
    return Wanted(
        arguments.job,
        arguments.set,
        arguments.seed,
        arguments.minutes,
        arguments.mtbf,
        arguments.faults,
        arguments.reference,
    )


def chaos(wanted: Wanted) -> int:
    """Run it all; the exit code. Raises what can be refused before anything is started."""
    base = load_job(wanted.job, wanted.settings)
    schedule = schedule_of(wanted)
    own = [fault.model_dump() for fault in base.faults]
    suffix = f"-chaos-{wanted.seed}" if wanted.faults is None else f"-chaos-{wanted.faults.stem}"
    job = place(base, suffix, [*own, *schedule.at_steps])
    reference = place(base, f"{suffix}-reference", schedule.of_the_reference())
    job, reference, there = ready(job, reference, wanted.reference)
    with Signals() as signals:
        return _trial(wanted, schedule, job, reference, there, signals)


def schedule_of(wanted: Wanted) -> Schedule:
    if wanted.faults is not None:
        return read_fault_file(wanted.faults)
    return Schedule(draw(wanted.seed, wanted.minutes * 60.0, wanted.mtbf_seconds))


def _trial(
    wanted: Wanted,
    schedule: Schedule,
    job: JobConfig,
    reference: JobConfig,
    there: RunDirectory | None,
    signals: Signals,
) -> int:
    seconds = wanted.minutes * 60.0
    entries = [entry for entry in schedule.timed if entry.at_seconds < seconds]
    conductor = ScheduledFaults(entries, seconds, size_of(job))
    disturbed = disturb(job, conductor, conductor.injections, signals, _greeting(job, entries, wanted, there))
    if disturbed.sat.interrupted:
        complain(f"interrupted, so nothing was judged; the run is in {shown(disturbed.run.path)}")
        return INTERRUPTED
    refuse_to_judge(disturbed)
    if there is None:
        steps = len(disturbed.records)
        greeting = f"2 of 2: the same {counted(steps, 'step')} undisturbed, into {shown(reference.run_dir)}"
        there, sat = make_reference(reference, steps, signals, greeting)
        if sat.interrupted:
            complain(f"interrupted, so nothing was judged; the run is in {shown(disturbed.run.path)}")
            return INTERRUPTED
        if sat.outcome.state == "failed":
            raise HostError(f"the undisturbed run failed, so there is nothing to compare with: {sat.outcome.reason}")
    records = read_ledger(there.ledger)
    what = _what(wanted, conductor, disturbed, there)
    report = Report(what, rates(disturbed, records), judge(disturbed, records, conductor.stuck), disturbed.faults)
    write_report(disturbed.run, REPORT, report)
    show(report, disturbed, conductor)
    return 0 if report.kept else 1


def size_of(job: JobConfig) -> Size:
    cluster = job.cluster
    return Size(cluster.nodes, cluster.workers_per_node, cluster.min_workers, job.train.logical_ranks)


def _greeting(job: JobConfig, entries: Sequence[Any], wanted: Wanted, there: RunDirectory | None) -> str:
    at_steps = f" and {counted(len(job.faults), 'fault')} at steps" if job.faults else ""
    source = f"from {wanted.faults}" if wanted.faults is not None else f"drawn with seed {wanted.seed}"
    number = "1 of 2: " if there is None else ""
    scheduled = f"{counted(len(entries), 'fault')}{at_steps} {source}"
    return f"{number}{scheduled} within {wanted.minutes:g} minutes from the first step, into {shown(job.run_dir)}"


def _what(wanted: Wanted, conductor: ScheduledFaults, disturbed: Disturbed, reference: RunDirectory) -> dict[str, Any]:
    return {
        "seed": wanted.seed if wanted.faults is None else None,
        "minutes": wanted.minutes,
        "mtbf_seconds": wanted.mtbf_seconds if wanted.faults is None else None,
        "run": str(disturbed.run.path),
        "reference": str(reference.path),
        "state": disturbed.sat.outcome.state,
        "steps": len(disturbed.records),
        "ended_early": ended_early(disturbed, conductor),
        "not_injected": not_injected(disturbed, conductor),
        "rollbacks": disturbed.rollbacks,
        "left": list(disturbed.left),
    }


def ended_early(disturbed: Disturbed, conductor: ScheduledFaults) -> bool:
    """The job came to its own end before its faults did."""
    return disturbed.sat.stopped_at is None


def not_injected(disturbed: Disturbed, conductor: ScheduledFaults) -> list[str]:
    """What was on the schedule and didn't happen, each with the reason."""
    passed_over = [f"{entry.fault} at {entry.at_seconds:.1f} s: {why}" for entry, why in conductor.passed_over]
    refused = [f"{i.fault} at {i.planned_seconds:.1f} s: {i.answer}" for i in conductor.injections if not i.done]
    return passed_over + refused


def show(report: Report, disturbed: Disturbed, conductor: ScheduledFaults) -> None:
    table.show(
        *([table.faults_table(by_kind(disturbed.faults))] if disturbed.faults else []),
        table.facts_table(facts(report, disturbed, conductor)),
        table.promises_table(report.promises),
        table.verdict_text(verdict(report, disturbed, conductor), report.kept),
    )


def facts(report: Report, disturbed: Disturbed, conductor: ScheduledFaults) -> list[tuple[str, str]]:
    ours, theirs = report.rates
    goodput = "-" if report.goodput is None else f"{report.goodput:.3f} of the undisturbed run's"
    rate = "-" if ours is None or theirs is None else f"{ours:,.0f} tokens/s, undisturbed {theirs:,.0f}"
    rows = [("steps", str(len(disturbed.records))), ("goodput", f"{goodput} ({rate})")]
    if missed := not_injected(disturbed, conductor):
        rows.append(("not injected", f"{len(missed)}: {missed[0]}" + (", ..." if len(missed) > 1 else "")))
    if disturbed.sat.outcome.state == "done" and ended_early(disturbed, conductor):
        rows.append(("ended before", "the job came to its last step before its faults did; raise train.steps"))
    return rows


def verdict(report: Report, disturbed: Disturbed, conductor: ScheduledFaults) -> str:
    """The one clear line."""
    faults = counted(len(disturbed.faults), "fault")
    if not report.kept:
        return f"BROKEN after {faults}: {report.broken()}; see {shown(disturbed.run.path)}"
    early = "; the job ended before its schedule" if ended_early(disturbed, conductor) else ""
    return f"kept: {faults} in {counted(len(disturbed.records), 'step')}, and every promise held{early}"
