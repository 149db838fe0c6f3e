"""What one worker knows of its step, and its own share of it: logical ranks computed, kept as subtrees (rules 3, 8).

The state of the step transaction, and the small moves on it. What is done with it is runtime/step.py (the step) and
runtime/change.py (a change of members).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dataloader.errors import InternalError
from dataloader.stream import fold_digests
from runtime.actions import Action, Send
from runtime.arithmetic import Arithmetic, Payload
from runtime.comm.order import children, root
from runtime.copies import Holding
from runtime.guard import GuardRules, Verdict
from runtime.protocol import (
    NO_BALLOT,
    Ballot,
    Certificate,
    Figures,
    Frame,
    FrameKind,
    Header,
    Node,
    Plan,
    RankWork,
    StepRecord,
    WorkerId,
)


@dataclass(frozen=True, slots=True)
class Contribution:
    nodes: tuple[Node, ...]
    payload: Payload
    work: tuple[tuple[int, RankWork], ...]


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What the transaction knows of its job, fixed for life."""

    logical_ranks: int
    shards: int
    global_batch: int
    save_every: int  # versions between full checkpoints; 0: only at the end
    gates: frozenset[int] = frozenset()  # steps whose boundary is held until released
    guard: GuardRules = field(default_factory=GuardRules)


class StepState:
    def __init__(
        self,
        worker: WorkerId,
        facts: JobFacts,
        arithmetic: Arithmetic,
        judge: Callable[[Certificate], Verdict],
    ) -> None:
        self.worker = worker
        self.facts = facts
        self.arithmetic = arithmetic
        self.judge = judge
        self.root: Node = root(facts.logical_ranks)
        self.plan: Plan | None = None
        self.promise: Ballot = NO_BALLOT
        self.step = -1
        self.bare = False  # parameters incomplete: being brought to step + 1 by the owners
        self.certificate: Certificate | None = None  # of self.step
        self.previous: Certificate | None = None  # of self.step - 1
        self.history: tuple[Figures, ...] = ()  # of the last committed steps, a certified self.step included
        self.holdings: dict[int, Holding] = {}
        # what others should have, by shard as (version, digest): parameters, and the owner's state
        self.published: dict[int, tuple[int, bytes]] = {}
        self.owners_say: dict[int, tuple[int, bytes]] = {}
        self.released: set[int] = set()
        self.held = False
        self.waiting: list[tuple[WorkerId, Frame]] = []  # frames whose time has not come (rule 2)
        self.snapshots_owed: list[tuple[int, WorkerId]] = []
        self.nodes: set[Node] = set()  # own computed subtrees of self.step
        self.work: dict[int, RankWork] = {}
        self._actions: list[Action] = []
        self.clear_step()

    def clear_step(self) -> None:
        """Forget what belongs to one attempt at one step: records, contributions, staged parts (rules 8, 14)."""
        self.records: dict[int, dict[WorkerId, Header]] = {}
        self.filled_votes: dict[int, int] = {}
        self.contributions: dict[int, dict[WorkerId, Contribution]] = {}
        self.reduced: dict[int, Header] = {}
        self.staged: dict[int, bytes] = {}
        self.contributed = False
        self.doubted: tuple[Header, ...] = ()  # what the records say that don't decide the step
        self.doubt = ""

    @property
    def frozen(self) -> bool:
        return self.plan is None or self.promise != self.plan.ballot

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def act(self, action: Action) -> None:
        self._actions.append(action)

    def installed(self) -> Plan:
        if self.plan is None:
            raise InternalError(f"worker {self.worker} has no plan")
        return self.plan

    def send(self, to: WorkerId, kind: FrameKind, shard: int, meta: Any, payload: Payload = None) -> None:
        self.act(Send(to, Frame(kind, self.installed().ballot, self.step, shard, meta, payload)))

    def step_record(self, certificate: Certificate) -> StepRecord:
        plan, verdict = self.installed(), self.judge(certificate)
        batch = self.facts.global_batch
        filled = [self.filled_votes.get(s, 0) for s in range(self.facts.shards)]
        return StepRecord(
            step=self.step,
            generation=plan.ballot.number,
            workers=len(plan.members),
            copies=max(plan.copies(), 1 + min(filled)),
            samples=(self.step * batch, (self.step + 1) * batch),
            tokens=verdict.tokens,
            loss=verdict.loss,
            grad_norm=verdict.grad_norm,
            lr=verdict.lr,
            verdict=verdict.kind,
            digest=fold_digests(self.staged[s] for s in range(self.facts.shards)).hex(),
            data_digest=certificate.headers[0].data_digest.hex(),
            reason=certificate.skipped,
            attempts=certificate.attempts,
            wrong=certificate.wrong,
        )

    # --- one's own logical ranks ------------------------------------------------------------------------------

    def wants(self, step: int, rank: int) -> bool:
        """Whether this rank's gradient is still of use; if not, it is not to be kept nor told of."""
        return step == self.step and self.certificate is None and rank not in self.work

    def assigned(self) -> set[int]:
        plan = self.installed()
        ranks = plan.ranks_now if self.step == plan.version else plan.ranks_next
        return {rank for rank, worker in enumerate(ranks) if worker == self.worker}

    def missing(self) -> tuple[int, ...]:
        return tuple(sorted(self.assigned() - self.work.keys()))

    def keep_assigned(self) -> None:
        """Forget subtrees that are no longer ours; pre-add siblings as soon as both are whole."""
        assigned = self.assigned()
        for node in sorted(self.nodes):
            if not assigned.issuperset(range(*node)):
                self.forget_node(node)
        for parent in self._parents(self.root):
            left, right = children(parent)
            if left in self.nodes and right in self.nodes and assigned.issuperset(range(*parent)):
                self.arithmetic.merge(left, right)
                self.nodes -= {left, right}
                self.nodes.add(parent)

    def _parents(self, node: Node) -> list[Node]:
        """Inner nodes below and at `node`, children before parents."""
        if node[1] - node[0] < 2:
            return []
        left, right = children(node)
        return [*self._parents(left), *self._parents(right), node]

    def forget_node(self, node: Node) -> None:
        self.arithmetic.forget(node)
        self.nodes.discard(node)
        for rank in range(*node):
            self.work.pop(rank, None)
