"""The jobs of a trial: the disturbed one, its undisturbed reference, where they lie, and whether two are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataloader.errors import ConfigError, UsageError
from elastic.config import JobConfig, first_change, parse_job, stored_job
from elastic.launch import with_data
from elastic.rundir import RunDirectory, has_run, holder, refuse
from elastic.watch import last_end

PAD = "train.pad_micro_batch_seconds"
# What doesn't touch the bits of a step: where a run lies, who computes it, for how long, what is written besides.
NO_BITS = ("run.", "cluster.", "metrics.", "policy.", "links.", "faults", "checkpoint.", "balance.", PAD)


def place(job: JobConfig, suffix: str, faults: Sequence[Mapping[str, Any]]) -> JobConfig:
    """The job in a run directory beside its own, with these faults. Raises ConfigError if one doesn't fit it."""
    given = job.model_dump(mode="json")
    given["run"]["dir"] = f"{job.run_dir}{suffix}"
    given["faults"] = [dict(fault) for fault in faults]
    return parse_job(given, "--faults")


def until(reference: JobConfig, steps: int) -> JobConfig:
    """The same job, ended at that step: an early end, since the schedule of the learning rate must stay."""
    if steps >= reference.train.steps:
        return reference
    given = reference.model_dump(mode="json")
    given["faults"] = [fault for fault in given["faults"] if fault["at_step"] < steps]
    given["faults"].append({"at_step": steps, "fault": "stop", "wait": True})
    return parse_job(given, "the reference")


def ready(job: JobConfig, reference: JobConfig, given: Path | None) -> tuple[JobConfig, JobConfig, RunDirectory | None]:
    """Both with their data, and the reference's run if one was `given`. Raises what can be refused before a start."""
    refuse_taken(job)
    if given is None:
        refuse_taken(reference)
    job = with_data(job)
    reference = reference.model_copy(update={"data": job.data, "model": job.model})
    return job, reference, None if given is None else finished_reference(given, job)


def refuse_taken(job: JobConfig) -> None:
    """Raises UsageError if the run directory is another run's or lives. Changes nothing."""
    run = RunDirectory(job.run_dir)
    if holder(run) is None and run.path.is_dir() and has_run(run):
        raise UsageError(f"{run.path}: has a run in it; remove the directory, or name another with --set run.dir=...")
    refuse(run, resume=False)


def finished_reference(path: Path, job: JobConfig) -> RunDirectory:
    """An undisturbed run that is there already. Raises UsageError or ConfigError if it is none, or of another job."""
    run = RunDirectory(path)
    if not run.job.is_file():
        raise UsageError(f"--reference {path}: is no run directory; name that of an undisturbed run of the same job")
    change = first_change(stored_job(run.job), job, NO_BITS)
    if change is not None:
        key, there, here = change
        raise ConfigError(
            f"--reference {path}: {key}: is {there!r} there and {here!r} here; name a run of the same job"
        )
    if holder(run) is not None:
        raise UsageError(f"--reference {path}: a job is running there; wait for its end, or leave --reference away")
    end = last_end(run)
    if end is None or end.get("state") not in ("done", "stopped"):
        raise UsageError(f"--reference {path}: didn't end well; leave --reference away, and one is made")
    return run
