"""What somebody who looks on may be told of a run, beside its trace. Nobody looks on here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.faults import Fault
    from runtime.protocol import Ballot, Certificate, Plan, WorkerId
    from tests.sim.worker import SimWorker


class Watch:
    def fault(self, fault: Fault, at: SimWorker | None) -> None:
        """It happens now; `at`: to who came to its point, if it waited for one."""

    def controller_started(self, incarnation: int) -> None: ...
    def asked(self, ballot: Ballot, worker: WorkerId) -> None: ...
    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """One that the controller writes down."""

    def woke(self, worker: SimWorker) -> None:
        """It goes on, right where it was stopped."""

    def died(self, worker: SimWorker) -> None: ...
    def lost_link(self, worker: SimWorker, peer: WorkerId) -> None: ...
    def promised(self, worker: SimWorker) -> None:
        """It freezes, and is about to report."""

    def installed(self, worker: SimWorker, plan: Plan) -> None: ...
    def refused(self, worker: SimWorker, ballot: Ballot) -> None:
        """A plan, which isn't the one that was promised."""

    def entered(self, worker: SimWorker, step: int) -> None: ...
    def certified(self, worker: SimWorker, certificate: Certificate) -> None:
        """It is the first of all to hold the certificate."""

    def filled(self, worker: SimWorker, shard: int) -> None: ...
    def over(self, worker: SimWorker, sender: WorkerId, ballot: Ballot) -> None:
        """A frame of an older generation is dropped."""
