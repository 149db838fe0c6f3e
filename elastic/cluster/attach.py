"""Reaching a running job from another process, through its `cluster.json`."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dataloader.errors import HostError, UsageError
from elastic.cluster.engine import connected_ray
from elastic.faults import parse_fault
from elastic.record_lines import read_events
from elastic.rundir import holder, open_run

ANSWER_SECONDS = 30.0
RETRY_SECONDS = 0.3


def inject(run_dir: Path, faults: Sequence[str]) -> list[str]:
    """Ask the job's controller for each of the faults, in order; a line for each of what became of it.

    Raises UsageError if no job is up in `run_dir` or a fault is none, HostError if its Ray can't be reached.
    """
    wanted = [str(parse_fault(text)) for text in faults]
    with reached(run_dir) as request:
        return [line for fault in wanted for line in request(fault)]


@contextlib.contextmanager
def reached(run_dir: Path) -> Iterator[Callable[[str], list[str]]]:
    """What asks the job's controller for one fault, as long as the block runs. Raises what `inject` does."""
    contact = _contact(run_dir)
    try:
        address, namespace, name = contact["address"], contact["namespace"], contact["controller"]
    except KeyError as error:
        raise UsageError(f"{run_dir}/cluster.json: lacks {error}; it was written by another version") from None
    with connected_ray(address, namespace, contact.get("token_path")):
        yield lambda fault: _request(run_dir, name, fault)


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
    """Asked once: what a controller may have done before it went must not be done twice."""
    import ray

    controller = _controller(run_dir, name)
    asked = time.time()
    try:
        answer: list[str] = ray.get(controller.request.remote(fault), timeout=ANSWER_SECONDS)
    except ray.exceptions.RayError:
        return [_became_of(run_dir, fault, asked)]
    return answer


def _controller(run_dir: Path, name: str) -> Any:
    """The job's controller, once it answers: it may be on its way back."""
    import ray

    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            controller = ray.get_actor(name)
            ray.get(controller.__ray_ready__.remote(), timeout=ANSWER_SECONDS)
            return controller
        except (ray.exceptions.RayError, ValueError) as error:
            if holder(open_run(run_dir)) is None:
                raise UsageError(f"{run_dir}: the job has ended; nothing was injected") from None
            if time.monotonic() > deadline:
                raise HostError(f"{run_dir}: the job's controller doesn't answer: {type(error).__name__}") from error
        time.sleep(RETRY_SECONDS)


def _became_of(run_dir: Path, fault: str, since: float) -> str:
    """The controller didn't answer, kill-controller's never does; but it writes down what it is about to do."""
    time.sleep(RETRY_SECONDS)
    run = open_run(run_dir)
    noted = [e.get("fault") for e in read_events(run.events) if e["kind"] == "fault_injected" and e["time"] >= since]
    if fault in noted:
        return f"{fault}: injected"
    raise HostError(f"{fault}: the controller went away while asked and may have done it; look for it in {run.events}")
