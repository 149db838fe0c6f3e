"""What the controller knows, what of it survives it, and how it speaks. Pure.

Four rooms make one controller: this one; elastic/workforce.py, who is there; elastic/bookkeeping.py, what is recorded;
elastic/controller.py, what follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic import messages as m
from elastic.balance import NEVER, Balance, Terms
from elastic.ballots import Ballots
from elastic.chronicle import Chronicle
from elastic.departure import Departures
from elastic.detector import AgentWatch
from elastic.faults import Fault, Point
from elastic.injection import FaultEntry, Schedule
from elastic.messages import Action, NodeId
from elastic.policy import Policy
from elastic.recovery import Costs
from elastic.roster import Roster
from elastic.skew import Skews
from elastic.suspects import Suspects
from runtime.guard import GuardRules
from runtime.protocol import Figures, WorkerId


@dataclass(frozen=True, slots=True)
class ControllerFacts:
    """What the controller knows of its job, from the job file."""

    nodes: int
    workers_per_node: int
    standbys: int
    min_workers: int
    logical_ranks: int
    shards: int
    steps: int
    micro_batches_per_rank: int
    faults: tuple[FaultEntry, ...] = ()
    policy: Policy = field(default_factory=Policy)
    balance: Terms = NEVER
    global_batch: int = 0
    guard: GuardRules = field(default_factory=GuardRules)


class ControllerState:
    """`durable`: the last persisted state, if any; `ledger_digest`: of a step that is in the ledger; `epoch`: what the
    wall clock said when the clock that `now` is read from said 0 (for records only); `ledger_figures(end, count)`: of
    the last committed steps before `end`, so many at most."""

    def __init__(
        self,
        facts: ControllerFacts,
        durable: Mapping[str, Any] | None,
        incarnation: int,
        ledger_next: int,
        ledger_digest: Callable[[int], str | None],
        checkpoint: int | None,
        epoch: float = 0.0,
        ledger_figures: Callable[[int, int], tuple[Figures, ...]] = lambda end, count: (),
    ) -> None:
        self.facts = facts
        self.epoch = epoch
        self.ledger_figures = ledger_figures
        self.roster = Roster(facts.workers_per_node, facts.standbys)
        self.schedule = Schedule(facts.faults)
        self.ballots = Ballots(incarnation)
        self.suspects = Suspects()
        self.agents = AgentWatch()
        self.chronicle = Chronicle(facts.shards, ledger_next, ledger_digest, checkpoint)
        self.costs = Costs()
        self.skews = Skews()
        self.departures = Departures()
        self.balance = Balance(facts.balance, facts.logical_ranks, facts.micro_batches_per_rank, facts.steps)
        self.computed = 0
        self.begun_at = ledger_next  # steps in the ledger when the job began
        # Members that no agent has told this incarnation of yet: (node, micro-batches computed)
        self.unseen: dict[WorkerId, tuple[NodeId, int]] = {}
        self.stop_requested = False
        self.stop_reason = ""  # of a stop that nobody asked for
        self.redistributing = False  # survivors go on by themselves, and standbys join later
        self.broken = ""  # why the job can't go on, if it is to end for that
        self.armed: list[Fault] = []  # injected faults that wait here for a point of the protocol
        self.deferred: list[str] = []  # faults from the command line, until the agents have told who is there
        if durable is not None:
            self.restore(durable)
        self.fresh = not (self.roster.slots or self.roster.nodes)
        self.cause = "" if self.fresh else "new controller"  # a ballot is due
        self.returning: set[int] = set()  # slots whose agents have not introduced themselves to this incarnation
        self.dead_agents: set[str] = set()  # instances
        self.started = 0.0
        self.join_at: float | None = None
        self.reference: m.WorkerInfo | None = None
        self.initialising: WorkerId | None = None
        self.prune_due = False
        self.delayed_saves: set[int] = set()  # versions
        self.failed_starts = 0
        self.agents_in_place: Counter[int] = Counter()  # that came since then, by slot
        self.start_after = 0.0  # no worker is started before
        self.deaths_in_place = 0  # since the last step that was recorded
        self.failure = ""
        self.last_words: dict[WorkerId, str] = {}
        self.told_attempts: set[tuple[int, int]] = set()  # (step, attempt) that an event tells of
        self.position = ledger_next  # steps decided by those who train now: fewer than the ledger's in a replay
        self.last_step: Mapping[str, Any] = {}
        self.ended: tuple[str, str] | None = None
        self.waiting_for_workers = False
        self.now = 0.0
        self._actions: list[Action] = []

    def wall(self) -> float:
        return self.epoch + self.now

    def place(self) -> tuple[int, int]:
        """(step, generation), as events and the status give them."""
        return min(self.position, self.chronicle.ledger_next), self.ballots.number

    def act(self, action: Action) -> None:
        self._actions.append(action)

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def end(self, state: str, reason: str) -> None:
        if self.ended is None:
            self.ended = (state, reason)
            micro_batches = self.facts.logical_ranks * self.facts.micro_batches_per_rank
            self.costs.recomputed = max(0, self.computed - (self.chronicle.ledger_next - self.begun_at) * micro_batches)
            totals = {"computed": self.computed, "recomputed": self.costs.recomputed, "faults": self.costs.faults}
            self.act(m.AppendEvent("run_ended", {"state": state, "reason": reason, **totals}))
            self.act(m.PublishStatus())
            self.act(m.End(state, reason))

    def reach(self, point: Point) -> None:
        """Do what was armed for this point: right before what follows."""
        due, self.armed = [f for f in self.armed if f.during is point], [f for f in self.armed if f.during is not point]
        for _ in due:
            self.act(m.KillController())  # the only one that waits here

    # --- what survives, who is spoken to ----------------------------------------------------------------------------

    def persist(self) -> None:
        state = {
            "roster": self.roster.durable(),
            "members": [[worker, *self.facts_of(worker)] for worker in sorted(self.ballots.members)],
            "faults": self.schedule.durable(),
            "departures": self.departures.durable(),
            "stop": [self.stop_requested, self.stop_reason, self.broken],
            "number": self.ballots.number,
            "balance": self.balance.durable(),
            "totals": {**self.costs.totals(), "computed": self.computed - self.retold(), "begun_at": self.begun_at},
        }
        self.act(m.Persist(state))

    def facts_of(self, member: WorkerId) -> tuple[NodeId, int]:
        known = self.roster.workers.get(member)
        return self.unseen[member] if known is None else (known.node, known.computed)

    def retold(self) -> int:
        """Micro-batches of those that a new controller is told of anew: the living, and members that have died."""
        return sum(w.computed for w in self.roster if w.alive or w.id in self.ballots.members)

    def restore(self, state: Mapping[str, Any]) -> None:
        self.roster.restore(state["roster"])
        self.unseen = {worker: (node, computed) for worker, node, computed in state["members"]}
        self.ballots.members = set(self.unseen)
        self.schedule.restore(state["faults"])
        self.departures.restore(state["departures"])
        self.stop_requested, self.stop_reason, self.broken = state["stop"]
        self.ballots.number = state["number"]
        self.balance.restore(state["balance"])
        self.costs.restore(state["totals"])
        self.computed = state["totals"]["computed"]  # the rest is `retold`
        if state["totals"]["begun_at"] is not None:
            self.begun_at = state["totals"]["begun_at"]

    def to_worker(self, worker: WorkerId, message: Mapping[str, Any]) -> None:
        if self.roster.lives(worker):
            self.act(m.ToWorker(self.roster.workers[worker].slot, worker, message))


def resumed_state(durable: Mapping[str, Any], same_faults: bool) -> dict[str, Any]:
    """What a job that resumes a run keeps of its last controller: the numbers given out, the faults already done."""
    roster = {**durable["roster"], "slots": [], "first": [], "reserved": [], "nodes": []}
    faults = durable["faults"] if same_faults else []
    totals = {**Costs().totals(), "computed": 0, "begun_at": None}  # each job counts its own
    own = {"balance": {"slowness": [], "moved_at": None, "in_vain": 0}, "totals": totals}
    kept = {**durable, "roster": roster, "faults": faults, **own}
    return {**kept, "members": [], "departures": [], "stop": [False, "", ""]}
