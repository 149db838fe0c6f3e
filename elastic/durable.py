"""What survives a controller: its small state in `controller.json`, and its incarnation, a number never given twice.

The number is that of a file in `incarnations/` that this controller, and no other, created (rule 9). The file system
decides between two who try, so nothing depends on what a dead controller managed to say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataloader.errors import DataError, HostError
from elastic.config import FaultConfig
from elastic.controller_state import resumed_state
from elastic.records import fsync_directory
from elastic.rundir import RunDirectory, write_atomic

RESTARTS_IN_PLACE = 8  # controllers of one job that began at one step: more of the same won't help


def read_state(run: RunDirectory) -> Mapping[str, Any] | None:
    """What the last controller persisted; None if there was none yet. Raises DataError if the file is damaged."""
    stored = _read(run)
    return None if stored is None else stored["state"]


def write_state(run: RunDirectory, state: Mapping[str, Any], faults: Sequence[FaultConfig]) -> None:
    """Durable when it returns. Raises HostError."""
    stored = {"faults": _fault_list(faults), "state": state}
    try:
        write_atomic(run.controller, json.dumps(stored).encode())
    except OSError as error:
        raise HostError(f"{run.controller}: can't be written: {error.strerror or error}") from None


def begin(run: RunDirectory, faults: Sequence[FaultConfig], resume: bool) -> None:
    """Before a job's first controller: keep of the last job's state what a resumed run must keep, else nothing."""
    stored = _read(run) if resume else None
    if stored is not None:
        write_state(run, resumed_state(stored["state"], stored["faults"] == _fault_list(faults)), faults)
    elif not resume:
        run.controller.unlink(missing_ok=True)


def new_incarnation(run: RunDirectory, run_id: str, step: int) -> int:
    """The next number, ours alone. Raises HostError if it can't be had, or if controllers keep dying at this step."""
    try:
        run.incarnations.mkdir(exist_ok=True)
        while True:
            taken = sorted(run.incarnations.iterdir())
            _refuse_endless(taken, run_id, step)
            number = int(taken[-1].name) + 1 if taken else 1
            path = run.incarnations / f"{number:06d}"
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            except FileExistsError:
                continue
            with os.fdopen(fd, "wb") as file:
                file.write(_birth(run_id, step))
                file.flush()
                os.fsync(file.fileno())
            fsync_directory(run.incarnations)
            return number
    except OSError as error:
        raise HostError(f"{run.incarnations}: can't be written: {error.strerror or error}") from None


def _birth(run_id: str, step: int) -> bytes:
    return json.dumps({"job": run_id, "step": step}).encode()


def _refuse_endless(taken: Sequence[Path], run_id: str, step: int) -> None:
    last = [path.read_bytes() for path in taken[-RESTARTS_IN_PLACE:]]
    if len(last) == RESTARTS_IN_PLACE and set(last) == {_birth(run_id, step)}:
        raise HostError(f"the controller ended {RESTARTS_IN_PLACE} times at step {step}; see logs/controller.log")


def _fault_list(faults: Sequence[FaultConfig]) -> list[Any]:
    return [fault.model_dump(mode="json") for fault in faults]


def _read(run: RunDirectory) -> dict[str, Any] | None:
    try:
        stored = json.loads(run.controller.read_bytes())
        if isinstance(stored["state"], dict) and isinstance(stored["faults"], list):
            return dict(stored)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        pass
    raise DataError(f"{run.controller}: damaged; delete it to resume with new node and worker numbers")
