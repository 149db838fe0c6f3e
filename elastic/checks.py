"""`everstep audit` and `everstep diff`: read the records and the data, show what elastic/audit.py finds."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from dataloader.errors import DataError, UsageError
from dataloader.shards import TokenShards
from dataloader.stream import SampleStream, step_digest
from elastic.audit import Check, Difference, Expected, audit, diff
from elastic.config import JobConfig, stored_job
from elastic.record_lines import read_ledger
from elastic.rundir import RunDirectory
from elastic.watch import last_end
from runtime.protocol import StepRecord


def audit_run(run: RunDirectory) -> bool:
    """Print each check and the verdict; does everything hold? Raises what `checks_of` does."""
    console = Console(file=sys.stderr)
    good = True
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading the data again", total=None)

        def advance(steps: int) -> None:
            progress.update(task, total=steps, advance=1)

        for check in checks_of(run, advance):
            _print_check(check)
            good = good and check.holds
    if records := _records_of(run):
        print(f"{'PASSED' if good else 'FAILED'}: {len(records)} steps, {records[-1].samples[1]} samples", flush=True)
    return good


def checks_of(run: RunDirectory, advance: Callable[[int], None] = lambda steps: None) -> Iterator[Check]:
    """Each check of the audit as it is finished; `advance` is told of each step whose data is read again, and of how
    many there are. Raises UsageError, ConfigError or DataError where there is nothing to audit or the data is not
    there."""
    job = stored_job(run.job)
    try:
        records = read_ledger(run.ledger)
    except DataError as error:
        yield Check("the ledger can be read", str(error))
        return
    if not records:
        raise UsageError(f"{run.path}: no step was decided here yet; there is nothing to audit")
    end = last_end(run)
    expected = Expected(
        steps=job.train.steps,
        global_batch=job.train.global_batch,
        tokens=job.train.global_batch * job.data.seq_len if job.recipe is None else None,
        done=end is not None and end.get("state") == "done",
    )
    with TokenShards(_data_path(run, job), "train") as shards:
        stream = SampleStream(shards, job.data.seq_len, job.shuffle_seed)
        yield from audit(records, expected, _digest_of(stream, job, lambda: advance(len(records))))


def _records_of(run: RunDirectory) -> list[StepRecord]:
    """None where they can't be read, which is a check of its own."""
    try:
        return read_ledger(run.ledger)
    except DataError:
        return []


def _data_path(run: RunDirectory, job: JobConfig) -> Path:
    if job.data.path is None:
        raise DataError(f"{run.job}: data.path: missing, so the data this run used can't be found")
    return job.data.path


def _digest_of(stream: SampleStream, job: JobConfig, advance: Callable[[], None]) -> Callable[[int], str]:
    train = job.train

    def digest(first: int) -> str:
        advance()
        return step_digest(stream, first, train.micro_batch, train.micro_batches_per_rank, train.logical_ranks).hex()

    return digest


def _print_check(check: Check) -> None:
    print(f"{'ok  ' if check.holds else 'NO  '} {check.name}", flush=True)
    if check.finding is not None:
        print(f"     {check.finding}", flush=True)


# --- two runs ------------------------------------------------------------------------------------------------


def diff_runs(a: RunDirectory, b: RunDirectory) -> bool:
    """Print in what two runs differ, or that they don't; are they the same? Raises DataError where a ledger can't be
    read and UsageError where both are empty."""
    records_a, records_b = read_ledger(a.ledger), read_ledger(b.ledger)
    if not records_a and not records_b:
        raise UsageError(f"{a.path}, {b.path}: neither has a step yet; there is nothing to compare")
    comparison = diff(records_a, records_b)
    if comparison.first is not None:
        _print_difference(comparison.first, records_a)
    else:
        print(f"equal over {comparison.common} steps")
    if comparison.lengths[0] != comparison.lengths[1]:
        print(f"lengths differ: {a.path} has {comparison.lengths[0]} steps, {b.path} has {comparison.lengths[1]}")
    return _diff_weights(a, b, comparison.lengths[0] == comparison.lengths[1]) and comparison.same


def _print_difference(first: Difference, records_a: list[StepRecord]) -> None:
    before = "they are equal before it" if first.step > records_a[0].step else "it is the first one"
    print(f"step {first.step} differs in {first.field}, {before}")
    print(f"  A: {first.a}")
    print(f"  B: {first.b}")


def _diff_weights(a: RunDirectory, b: RunDirectory, same_length: bool) -> bool:
    """Byte by byte if both have them; with ledgers of unequal length they belong to different steps."""
    if not (a.weights.is_file() and b.weights.is_file()) or not same_length:
        return True
    same = _hash(a.weights) == _hash(b.weights)
    print(f"weights: {'the same bytes' if same else 'the bytes differ'}")
    return same


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
