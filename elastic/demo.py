"""`everstep demo`: the example job twice, undisturbed and through failures, and the two results side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dataloader.errors import UsageError
from elastic.audit import Comparison, diff
from elastic.config import JobConfig, load_job
from elastic.launch import run_job
from elastic.record_lines import read_events, read_ledger
from elastic.rundir import RunDirectory, remove_run
from elastic.watch import complain
from runtime.protocol import StepRecord

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "stdlib.yaml"
# What happens to the second run: a worker is killed, then a whole node, and later a node joins.
FAULTS = "[{at_step: 8, fault: kill-worker=1}, {at_step: 16, fault: kill-node=1}, {at_step: 20, fault: add-node}]"


@dataclass(frozen=True, slots=True)
class Summary:
    """What the records of one run say of it."""

    records: Sequence[StepRecord]
    events: Sequence[Mapping[str, Any]]

    def rows(self) -> list[tuple[str, str]]:
        recoveries = [e for e in self.events if e.get("kind") == "recovery"]
        faults = [e for e in self.events if e.get("kind") == "fault_injected"]
        pauses = [f"{float(e['pause_ms']):.0f}" for e in recoveries if isinstance(e.get("pause_ms"), (int, float))]
        recomputed = sum(int(e.get("recomputed") or 0) for e in recoveries)
        last = self.records[-1] if self.records else None
        return [
            ("steps", str(len(self.records))),
            ("workers", _range([r.workers for r in self.records])),
            ("faults injected", str(len(faults))),
            ("pauses (ms)", ", ".join(pauses) or "none"),
            ("recomputed", f"{recomputed} micro-batches"),
            ("final loss", f"{last.loss:.6f}" if last else "-"),
            ("digest", last.digest if last else "-"),
        ]


def demo(parent: Path) -> int:
    """Run both into `parent`/demo-undisturbed and `parent`/demo-disturbed, replacing older ones; the exit code."""
    if not EXAMPLE.is_file():
        raise UsageError(f"{EXAMPLE}: no such file; run the demo from a checkout of Everstep (make demo)")
    titles = {"undisturbed": "[]", "disturbed": FAULTS}
    jobs = {name: _job(parent / f"demo-{name}", name, faults) for name, faults in titles.items()}
    for job in jobs.values():
        remove_run(RunDirectory(job.run_dir))
    for number, (name, job) in enumerate(jobs.items(), start=1):
        print(f"\n{number} of 2: {name}{_announcement(job)}", flush=True)
        _, outcome = run_job(job, resume=False, detach=False, address="local")
        if outcome.state != "done":
            if outcome.state == "failed":
                complain(outcome.reason)
            return outcome.exit_code
    return _compare({name: RunDirectory(job.run_dir) for name, job in jobs.items()})


def _job(directory: Path, name: str, faults: str) -> JobConfig:
    return load_job(EXAMPLE, [f"run.name=demo-{name}", f"run.dir={directory.resolve()}", f"faults={faults}"])


def _announcement(job: JobConfig) -> str:
    cluster = job.cluster
    size = f" ({cluster.nodes} nodes x {cluster.workers_per_node} workers, {job.train.steps} steps"
    faults = ", ".join(f"{f.fault} at step {f.at_step}" for f in job.faults)
    return f"{size}; {faults})" if faults else f"{size})"


def _compare(runs: Mapping[str, RunDirectory]) -> int:
    summaries = {name: Summary(read_ledger(run.ledger), read_events(run.events)) for name, run in runs.items()}
    a, b = (summary.records for summary in summaries.values())
    comparison = diff(a, b)
    weights_a, weights_b = (run.weights.read_bytes() for run in runs.values())
    same = comparison.same and weights_a == weights_b
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)  # rather than the 80 that rich takes for a pipe
    console.print()
    console.print(_table(summaries))
    verdict = Text(_verdict(comparison, weights_a == weights_b), style="bold green" if same else "bold red")
    console.print(verdict, soft_wrap=True)
    return 0 if same else 1


def _table(summaries: Mapping[str, Summary]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")  # 79 columns with two digests
    table.add_column("")
    for name in summaries:
        table.add_column(name, overflow="fold")
    columns = [dict(summary.rows()) for summary in summaries.values()]
    for row in columns[0]:
        table.add_row(row, *(column[row] for column in columns))
    return table


def _verdict(comparison: Comparison, same_weights: bool) -> str:
    if comparison.first is not None:
        return f"NOT equal: step {comparison.first.step} differs in {comparison.first.field}"
    if not comparison.same:
        return f"NOT equal: {comparison.lengths[0]} and {comparison.lengths[1]} steps"
    if not same_weights:
        return "NOT equal: the weights files differ"
    return f"equal: all {comparison.common} steps have the same digests, and the weights files are the same bytes"


def _range(values: Sequence[int]) -> str:
    if not values:
        return "-"
    return str(values[0]) if min(values) == max(values) else f"{min(values)} to {max(values)}"
