"""Injected faults that wait in a worker for a point of the protocol. Pure.

A fault is armed by a message of the controller's: the fields of elastic/faults.py in plain form. Without a point it is
due at once; else it is due when the worker is about to do what the point names, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from runtime import actions as a
from runtime.protocol import FrameKind

Plain: TypeAlias = Mapping[str, Any]

STORE_FAILURES = {"disk-full": "no space left on device", "store-down": "the store doesn't answer"}
_SENT = {
    FrameKind.CONTRIBUTION: "reduce",
    FrameKind.RECORD: "vote",
    FrameKind.PARAMETERS: "publish",
    FrameKind.SNAPSHOT: "handover",
}


def point_of(action: a.Action) -> str | None:
    """The protocol point that lies right before this action, if any does."""
    match action:
        case a.Send(_, frame):
            return _SENT.get(frame.kind)
        case a.Save():
            return "save"
    return None


class Armed:
    """The faults that wait here."""

    def __init__(self) -> None:
        self._waiting: list[Plain] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def arm(self, fault: Plain) -> None:
        self._waiting.append(fault)

    def due(self, point: str | None) -> list[Plain]:
        """Those that wait for this point; they wait no longer."""
        due = [fault for fault in self._waiting if fault["during"] == point]
        self._waiting = [fault for fault in self._waiting if fault["during"] != point]
        return due
