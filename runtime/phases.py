"""Where a step's seconds went, as one worker saw it: compute, reduce, vote, publish.

    enter ──compute──▶ contributed ──reduce──▶ own shards reduced ──vote──▶ certified ──publish──▶ decided

Marks are set when the driver has looked, so a phase that begins and ends within one event counts as nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.step import StepTransaction

PHASES = ("compute", "reduce", "vote", "publish")


class StepClock:
    def __init__(self) -> None:
        self._step = -1
        self._marks: list[float] = [0.0]

    def look(self, tx: StepTransaction, now: float) -> None:
        if tx.step != self._step:
            self._step, self._marks = tx.step, [now]
        passed = (tx.contributed, _reduced(tx), tx.certificate is not None)
        while len(self._marks) <= len(passed) and all(passed[: len(self._marks)]):
            self._marks.append(now)

    def decided(self, now: float) -> tuple[float, dict[str, float]]:
        """(seconds of the step, seconds by phase); the next step begins."""
        marks = [*self._marks, *([now] * (len(PHASES) + 1 - len(self._marks)))]
        phases = {name: marks[i + 1] - marks[i] for i, name in enumerate(PHASES)}
        self._marks = [now]
        return now - marks[0], phases


def _reduced(tx: StepTransaction) -> bool:
    plan = tx.plan
    if plan is None:
        return False
    return all(s in tx.reduced for s, where in enumerate(plan.shards) if where.owner == tx.worker)
