"""`everstep status`: where a run stands, from its files and its lock."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from elastic.config import stored_job
from elastic.record_lines import Tail
from elastic.rundir import RunDirectory, holder
from elastic.view import member_table
from elastic.watch import last_end, outcome_of, read_status


def read(run: RunDirectory) -> dict[str, Any]:
    """`state, step, steps, generation, members`, and for a run that has ended `reason` if there is one.

    `state` is the controller's while the job lives, `starting` before it has said anything, and `done`, `stopped` or
    `failed` afterwards, when there are no members any more. `step` counts the steps that were decided.
    Raises ConfigError or DataError where the run's files can't be read.
    """
    job = stored_job(run.job)
    alive = holder(run) is not None
    said = read_status(run) or {}
    records = Tail(run.ledger).read()
    last = records[-1] if records else {}
    status: dict[str, Any] = {
        "state": said.get("state", "starting"),
        "step": len(records) if not alive else said.get("step", len(records)),
        "steps": job.train.steps,
        "generation": said.get("generation", last.get("generation", 0)),
        "members": said.get("members", []),
    }
    if not alive:
        outcome = outcome_of(run, last_end(run))
        status |= {"state": outcome.state, "members": []}
        if outcome.reason:
            status["reason"] = outcome.reason
    return status


def show(status: dict[str, Any]) -> None:
    """The same for people."""
    live = bool(status["members"]) or status["state"] not in ("done", "stopped", "failed")
    ended = "" if live else "ended: "
    line = f"{ended}{status['state']}, step {status['step']} of {status['steps']}, generation {status['generation']}"
    print(f"{line}; {status['reason']}" if status.get("reason") else line, flush=True)
    if status["members"]:
        Console().print(member_table([m for m in status["members"] if isinstance(m, dict)]))
