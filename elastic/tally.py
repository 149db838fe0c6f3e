"""What a run has been through, counted from its events: so a new controller, or a resumed run, counts on. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Tally:
    injected: Counter[str] = field(default_factory=Counter)  # by kind of fault
    detected: Counter[str] = field(default_factory=Counter)  # by how it was noticed
    rebalances: int = 0
    pauses: int = 0
    pause_seconds: float = 0.0

    def add(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Take in one event."""
        match kind:
            case "fault_injected":
                self.injected[str(fields.get("fault", "")).partition("=")[0]] += 1
            case "fault_detected":
                self.detected[str(fields.get("notice", ""))] += 1
            case "rebalance":
                self.rebalances += 1
            case "recovery":
                self.pauses += 1
                self.pause_seconds += float(fields.get("pause_ms") or 0.0) / 1e3

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Tally:
        tally = cls()
        for event in events:
            tally.add(str(event.get("kind")), event)
        return tally

    def plain(self) -> dict[str, Any]:
        return {
            "injected": dict(self.injected),
            "detected": dict(self.detected),
            "rebalances": self.rebalances,
            "pauses": self.pauses,
            "pause_seconds": self.pause_seconds,
        }
