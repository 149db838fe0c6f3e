"""Ledger records and events as lines of JSON: what is in them, how they are read, when two are the same.

A line without its newline was never written: every reader here passes over it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from dataloader.errors import DataError
from runtime.protocol import StepRecord

Event: TypeAlias = dict[str, Any]

LEDGER_FIELDS = (
    "step",
    "generation",
    "workers",
    "copies",
    "samples",
    "tokens",
    "loss",
    "grad_norm",
    "lr",
    "verdict",
    "digest",
    "data_digest",
    "time",
    "seconds",
)
# What two records of one step must agree in, whoever computed them and under whichever membership.
SAME_BITS_FIELDS = ("samples", "tokens", "data_digest", "loss", "grad_norm", "lr", "verdict", "digest")
EVENT_KINDS = (
    "fault_injected",
    "fault_skipped",
    "fault_detected",
    "recovery",
    "member_joined",
    "member_left",
    "save_failed",
    "preempted",
    "departure",
    "waiting",
    "plan",
    "rebalance",
    "rebalance_gain",
    "standby",
    "cut_off",
    "checkpoint",
    "bad_step",
    "run_ended",
)

_FLOATS = ("loss", "grad_norm", "lr", "time", "seconds")
_INTEGERS = ("step", "generation", "workers", "copies", "tokens")
_STRINGS = ("verdict", "digest", "data_digest")


# --- values ------------------------------------------------------------------------------------------------


def record_to_json(record: StepRecord) -> dict[str, Any]:
    """A ledger line's object. JSON has no NaN, so floats that aren't finite are written as strings."""
    out: dict[str, Any] = {name: getattr(record, name) for name in LEDGER_FIELDS}
    out["samples"] = list(record.samples)
    for name in _FLOATS:
        if not math.isfinite(out[name]):
            out[name] = str(float(out[name]))
    if record.reason:
        out["reason"] = record.reason
    return out


def record_from_json(given: Mapping[str, Any], where: str) -> StepRecord:
    """The other way. Raises DataError that names `where` and the field."""
    values: dict[str, Any] = {}
    try:
        for name in _INTEGERS:
            values[name] = _of_type(given, name, int)
        for name in _STRINGS:
            values[name] = _of_type(given, name, str)
        for name in _FLOATS:
            value = given[name]
            values[name] = float(value) if isinstance(value, str) else float(_of_type(given, name, (int, float)))
        first, end = _of_type(given, "samples", list)
        if not (type(first) is int and type(end) is int):
            raise TypeError("samples")
        values["samples"] = (first, end)
        values["reason"] = str(given.get("reason", ""))
    except KeyError as error:
        raise DataError(f"{where}: the record lacks {error.args[0]!r}") from None
    except (TypeError, ValueError):
        raise DataError(f"{where}: not a ledger record; {dict(given)!r:.200}") from None
    return StepRecord(**values)


def _of_type(given: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    value = given[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(name)
    return value


def bits(record: StepRecord, name: str) -> Any:
    """A field as a value whose `==` means equal bits: NaN equals itself, 0.0 and -0.0 differ."""
    value = getattr(record, name)
    return value.hex() if isinstance(value, float) else value


def differing_field(a: StepRecord, b: StepRecord) -> str | None:
    """The first of SAME_BITS_FIELDS in which two records of one step differ."""
    return next((name for name in SAME_BITS_FIELDS if bits(a, name) != bits(b, name)), None)


def encode(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(", ", ": "), allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """None for what isn't one JSON object."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def whole_lines(data: bytes, path: Path, first_line: int) -> list[tuple[bytes, dict[str, Any]]]:
    """The lines of `data` that were written to their end. A torn last one is left out, a torn other one is an error."""
    *lines, _torn = data.split(b"\n")
    found: list[tuple[bytes, dict[str, Any]]] = []
    for number, line in enumerate(lines):
        value = decode(line)
        if value is None:
            if number == len(lines) - 1:
                break
            raise DataError(f"{path}:{first_line + number + 1}: not a JSON object; the file is damaged")
        found.append((line + b"\n", value))
    return found


# --- reading -------------------------------------------------------------------------------------------------


def read_ledger(path: Path) -> list[StepRecord]:
    """All records in file order; none if there is no file. Raises DataError where one can't be read."""
    return [record_from_json(v, f"{path}:{n}") for n, v in enumerate(_read(path), start=1)]


def read_events(path: Path) -> list[Event]:
    """All events in file order; none if there is no file. Raises DataError where one can't be read."""
    return _read(path)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from None
    return [value for _, value in whole_lines(data, path, 0)]


class Tail:
    """What has been appended to a file since the last look; for viewers, who must never fail on a half-written line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        *lines, _torn = data.split(b"\n")
        found = []
        for number, line in enumerate(lines):
            value = decode(line)
            if value is None and number == len(lines) - 1:
                break  # perhaps cut off by the next append: look again then
            self._offset += len(line) + 1
            if value is not None:
                found.append(value)
        return found
