"""Ballots, and the plan that came out of the last one: who was asked, who has answered, who goes on. Pure.

open ──every asked worker that lives has reported──▶ closed ──plan──▶ adopted ──every member resumed──▶ settled
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from runtime.protocol import Ballot, Plan, Report, WorkerId


@dataclass(slots=True)
class Asking:
    ballot: Ballot
    since: float
    sent: float
    asked: set[WorkerId]
    reason: str
    reports: dict[WorkerId, Report] = field(default_factory=dict)

    def missing(self, lives: Callable[[WorkerId], bool]) -> set[WorkerId]:
        """Who is neither heard nor fenced."""
        return {w for w in self.asked - self.reports.keys() if lives(w)}


class Ballots:
    """`incarnation` comes from the linearizable counter (rule 9); `number` goes on over incarnations, for people."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.number = 0
        self.members: set[WorkerId] = set()  # of the last plan that any controller made
        self.asking: Asking | None = None
        self.plan: Plan | None = None
        self.sent = 0.0
        self.installed: set[WorkerId] = set()
        self.resumed: set[WorkerId] = set()
        self.unfilled: set[tuple[WorkerId, int]] = set()

    def open(self, asked: set[WorkerId], reason: str, now: float) -> Asking:
        self.number += 1
        self.asking = Asking(Ballot(self.incarnation, self.number), now, now, asked, reason)
        return self.asking

    def reported(self, report: Report) -> bool:
        """Whether it belongs to the open ballot."""
        asking = self.asking
        if asking is None or report.ballot != asking.ballot or report.worker not in asking.asked:
            return False
        asking.reports[report.worker] = report
        return True

    def adopt(self, plan: Plan, now: float) -> None:
        self.asking, self.plan, self.members, self.sent = None, plan, set(plan.ids()), now
        self.installed, self.resumed = set(), set()
        self.unfilled = {(w, s) for s, where in enumerate(plan.shards) for w in where.fill}

    def current(self, ballot: Ballot) -> bool:
        return self.plan is not None and self.plan.ballot == ballot

    def died(self, worker: WorkerId) -> bool:
        """Whether it matters to the plan or to the open ballot."""
        self.unfilled = {(w, s) for w, s in self.unfilled if w != worker}
        return worker in self.members or (self.asking is not None and worker in self.asking.asked)

    def settled(self) -> bool:
        """The plan is out and everyone goes on under it."""
        return self.plan is not None and self.asking is None and self.resumed >= self.members

    def all_installed(self) -> bool:
        """Everyone has the plan; also if there is none."""
        return self.plan is None or self.installed >= self.members

    def moving(self) -> bool:
        """Some shard has a copy too many, so that another can be retired once it is filled (rule 16)."""
        return self.plan is not None and any(len(s.backups) > 1 for s in self.plan.shards)

    def without_backup(self) -> int:
        """Shards with no complete copy but their owner's."""
        if self.plan is None:
            return 0
        return sum(all((w, s) in self.unfilled for w in where.backups) for s, where in enumerate(self.plan.shards))

    def facts(self, reason: str, rollback: bool) -> dict[str, Any]:
        """The plan, as an event tells it."""
        plan = self.plan
        assert plan is not None
        return {
            "generation": plan.ballot.number,
            "step": plan.version,
            "members": list(plan.ids()),
            "reason": reason,
            "rollback": rollback,
            "behind": [m.worker for m in plan.members if m.behind],
            "fills": sum(len(s.fill) for s in plan.shards),
        }
