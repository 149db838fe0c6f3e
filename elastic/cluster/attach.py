"""Reaching a running job from another process, through its `cluster.json`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataloader.errors import HostError, UsageError
from elastic.cluster.engine import connected_ray
from elastic.faults import FaultKind, parse_fault
from elastic.record_lines import read_events
from elastic.rundir import holder, open_run

ANSWER_SECONDS = 30.0


def inject(run_dir: Path, faults: Sequence[str]) -> list[str]:
    """Ask the job's controller for each of the faults, in order; a line for each of what became of it.

    Raises UsageError if no job is up in `run_dir` or a fault is none, HostError if its Ray can't be reached.
    """
    wanted = [str(parse_fault(text)) for text in faults]
    contact = _contact(run_dir)
    try:
        with connected_ray(contact["address"], contact["namespace"], contact.get("token_path")):
            return [line for fault in wanted for line in _request(run_dir, contact["controller"], fault)]
    except KeyError as error:
        raise UsageError(f"{run_dir}/cluster.json: lacks {error}; it was written by another version") from None


def _contact(run_dir: Path) -> Mapping[str, Any]:
    run = open_run(run_dir)
    if holder(run) is None:
        raise UsageError(f"{run_dir}: no job is running here; start one with `everstep run`")
    try:
        contact = json.loads(run.cluster.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{run_dir}: the job is not up yet, or at its end; try again in a moment") from None
    except ValueError:
        raise UsageError(f"{run_dir}/cluster.json: damaged; the job writes it when it starts") from None
    return contact if isinstance(contact, dict) else {}


def _request(run_dir: Path, name: str, fault: str) -> list[str]:
    import ray

    asked = time.time()
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            answer: list[str] = ray.get(ray.get_actor(name).request.remote(fault), timeout=ANSWER_SECONDS)
            return answer
        except (ray.exceptions.RayError, ValueError) as error:
            if _injected(run_dir, fault, asked):
                return [f"{fault}: injected"]
            if holder(open_run(run_dir)) is None:
                raise UsageError(f"{run_dir}: the job has ended; nothing was injected") from None
            if time.monotonic() > deadline:
                raise HostError(f"{run_dir}: the job's controller doesn't answer: {type(error).__name__}") from error
        time.sleep(0.3)


def _injected(run_dir: Path, fault: str, since: float) -> bool:
    """A controller that was told to kill itself can't answer, but it wrote down what it was about to do."""
    time.sleep(0.2)
    events = read_events(open_run(run_dir).events)
    done = any(e["kind"] == "fault_injected" and e.get("fault") == fault and e["time"] >= since for e in events)
    return done and fault == str(FaultKind.KILL_CONTROLLER)
