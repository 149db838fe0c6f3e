"""The file of `--faults`: a YAML list of entries as in a job file's `faults`, or with `at_seconds` for `at_step`.

    - {at_step: 20, fault: "corrupt-worker=1,what=gradient", wait: true}
    - {at_seconds: 12.5, fault: kill-node=1}
    - {at_seconds: 16, fault: add-node}

At a step the job does it to itself; at a time (seconds from the job's first step) it is injected from outside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataloader.errors import ConfigError, UsageError
from elastic.chaos.draw import CHANGES_THE_LEDGER, ENDS_THE_JOB, Entry
from elastic.faults import FaultKind, parse_fault
from elastic.yaml_text import parse

KEYS = ("at_step", "at_seconds", "fault", "wait")


@dataclass(frozen=True, slots=True)
class Schedule:
    """`at_seconds`, in order, and the entries for the job file."""

    timed: tuple[Entry, ...]
    at_steps: tuple[dict[str, Any], ...] = ()

    def of_the_reference(self) -> tuple[dict[str, Any], ...]:
        """What changes the ledger has to happen to the undisturbed run too."""
        return tuple(e for e in self.at_steps if parse_fault(e["fault"]).kind in CHANGES_THE_LEDGER)


def read_fault_file(path: Path) -> Schedule:
    """Raises ConfigError, one line that names the entry."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"{path}: can't be read: {said}; --faults names a YAML list of faults") from None
    return parse_entries(parse(text, str(path)), str(path))


def parse_entries(given: Any, where: str) -> Schedule:
    if not isinstance(given, list) or not given:
        raise ConfigError(
            f"{where}: not a list of faults; write entries such as {{at_seconds: 10, fault: kill-worker=1}}"
        )
    timed: list[Entry] = []
    at_steps: list[dict[str, Any]] = []
    for number, entry in enumerate(given):
        read = _entry(entry, f"{where}: [{number}]")
        if isinstance(read, Entry):
            timed.append(read)
        else:
            at_steps.append(read)
    return Schedule(tuple(sorted(timed, key=lambda entry: entry.at_seconds)), tuple(at_steps))


def _entry(given: Any, where: str) -> Entry | dict[str, Any]:
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: not a mapping; write {{at_seconds: 10, fault: kill-worker=1}}")
    if unknown := sorted(set(given) - set(KEYS)):
        raise ConfigError(f"{where}: {unknown[0]}: unknown key; the keys are {', '.join(KEYS)}")
    if ("at_step" in given) == ("at_seconds" in given):
        raise ConfigError(f"{where}: set one of at_step and at_seconds")
    try:
        fault = parse_fault(str(given.get("fault", "")))
    except UsageError as error:
        raise ConfigError(f"{where}: fault: {error}") from None
    if fault.kind in ENDS_THE_JOB:
        raise ConfigError(
            f"{where}: fault: {fault.kind} ends the job; `everstep chaos` ends it by itself, so remove it"
        )
    if "at_step" in given:
        return {**given, "fault": str(fault)}  # checked as the job file's own
    if fault.kind in CHANGES_THE_LEDGER:
        raise ConfigError(
            f"{where}: {fault.kind} changes the result, so the reference needs it too: give it an at_step"
        )
    if "wait" in given:
        raise ConfigError(f"{where}: wait: a fault at a time can't hold a step's boundary; give it an at_step")
    return Entry(_seconds(given["at_seconds"], where), fault)


def _seconds(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < math.inf:
        raise ConfigError(f"{where}: at_seconds: expected seconds from the job's first step, got {value!r}")
    return float(value)


def takes_nodes_back(schedule: Schedule) -> bool:
    """Whether nodes come back by the schedule itself."""
    return any(entry.fault.kind is FaultKind.ADD_NODE for entry in schedule.timed)
