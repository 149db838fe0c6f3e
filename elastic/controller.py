"""The controller: decides who is a member, and what happens when that changes. Pure: events and a time in, actions out.

It never sits in the step. What it does in a change is one procedure for all causes (rules 9 to 13):

    steady ──cause──▶ asking: ask(b) to every member that lives and to chosen joiners
                         │ every asked worker has reported, or is fenced (dead, or evicted and killed)
                         ▼
                      plan(b) to all its members ──every member resumed──▶ steady

Causes: a death, a lost link, a worker ready to join, filled copies that let old ones retire, `stop`, and being a new
incarnation. A cause that arrives while asking needs no new ballot unless the plan is out already.
Restarted, it has its small durable state (``Persist``), and the living agents tell the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dataloader.errors import InternalError, UsageError
from elastic import messages as m
from elastic.faults import Fault, FaultKind, parse_fault
from elastic.injection import FaultEntry, Schedule, Scheduled
from elastic.messages import Action, Event
from elastic.plan import Order, make_plan
from elastic.recovery import Recovery
from elastic.roster import Roster, Worker, WorkerState
from runtime.protocol import Ballot, Plan, Report, WorkerId, to_plain

SUSPECT_GRACE_SECONDS = 0.15  # before a worker that all others lost counts as gone without its agent's word
ASK_TIMEOUT_SECONDS = 15.0  # a control thread that doesn't report for so long is taken for dead
RESEND_SECONDS = 1.0
JOIN_DELAY_SECONDS = 0.1  # lets workers that come up together join together
START_PATIENCE_SECONDS = 180.0  # for the first workers to come up, before going on with fewer
RETURN_PATIENCE_SECONDS = 5.0  # a new incarnation's, for agents to introduce themselves
LINK_LOSSES = 3  # of one pair that lives, before one of the two has to go
FAILED_STARTS = 3  # workers in a row that die before they are up


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


@dataclass(slots=True)
class Asking:
    ballot: Ballot
    since: float
    sent: float
    asked: set[WorkerId]
    reason: str
    reports: dict[WorkerId, Report] = field(default_factory=dict)


class Controller:
    def __init__(
        self,
        facts: ControllerFacts,
        durable: Mapping[str, Any] | None,
        incarnation: int,
        ledger_next: int,
        ledger_digest: Callable[[int], str | None],
        checkpoint: int | None,
    ) -> None:
        self.facts = facts
        self.incarnation = incarnation
        self.roster = Roster(facts.workers_per_node, facts.standbys)
        self.schedule = Schedule(facts.faults)
        self.ledger_next, self.ledger_digest, self.checkpoint = ledger_next, ledger_digest, checkpoint
        self.number = 0
        self.members: set[WorkerId] = set()
        self.stop_requested = False
        if durable is not None:
            self.restore(durable)
        self.fresh = not self.roster.slots
        self.plan: Plan | None = None
        self.asking: Asking | None = None
        self.installed: set[WorkerId] = set()
        self.resumed: set[WorkerId] = set()
        self.plan_sent = 0.0
        self.unfilled: set[tuple[WorkerId, int]] = set()
        self.cause = "" if self.fresh else "new controller"  # a ballot is due
        self.returning: set[int] = set()  # slots whose agents have not introduced themselves to this incarnation
        self.started = 0.0
        self.join_at: float | None = None
        self.lost_links: dict[WorkerId, set[WorkerId]] = {}  # suspect -> who lost it
        self.suspected: dict[WorkerId, float] = {}
        self.link_losses: Counter[frozenset[WorkerId]] = Counter()
        self.left: set[WorkerId] = set()  # members whose leaving is recorded
        self.recovery: Recovery | None = None
        self.kills: dict[WorkerId, float] = {}
        self.records: dict[int, Any] = {}  # that came before their turn
        self.saved: dict[int, dict[int, Mapping[str, Any]]] = {}
        self.manifested: set[int] = set()
        self.weights = -1
        self.gates: dict[int, int] = {}
        self.reference: Worker | None = None
        self.initialising: WorkerId | None = None
        self.failed_starts = 0
        self.failure = ""
        self.last_step: Mapping[str, Any] = {}
        self.computed = 0
        self.recomputed = 0
        self.faults_seen = 0
        self.pause_seconds = 0.0
        self.ended = False
        self.waiting_for_workers = False
        self.now = 0.0
        self._actions: list[Action] = []

    # --- entry points -----------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Action]:
        self.now = self.started = now
        if self.fresh:
            self.roster.reserve_first(self.facts.nodes)
            self.persist()
            for slot in sorted(self.roster.slots):
                self.act(m.StartAgent(slot))
        else:
            self.returning = set(self.roster.slots)
            self.act(m.Wake(RETURN_PATIENCE_SECONDS))
        return self.take_actions()

    def handle(self, event: Event, now: float) -> list[Action]:
        self.now = now
        if not self.ended:
            self.take_in(event)
            self.think()
        return self.take_actions()

    def act(self, action: Action) -> None:
        self._actions.append(action)

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def take_in(self, event: Event) -> None:
        match event:
            case m.AgentUp():
                self.agent_up(event)
            case m.AgentDown(slot, instance, time):
                self.agent_down(slot, instance, time)
            case m.WorkerUp(info):
                self.worker_up(info)
            case m.WorkerLinked(worker):
                self.worker_linked(worker)
            case m.WorkerExited(worker, reason, time):
                self.worker_gone(worker, reason, time, "exit")
            case m.WorkerFailed(worker, message, theirs):
                self.worker_failed(worker, message, theirs)
            case m.LinkLost(worker, peer, time):
                self.link_lost(worker, peer, time)
            case m.Reported(report):
                self.reported(report)
            case m.PlanInstalled():
                self.plan_installed(event)
            case m.Resumed():
                self.worker_resumed(event)
            case m.Recomputed(worker, ballot, milliseconds):
                self.worker_recomputed(worker, ballot, milliseconds)
            case m.ShardFilled(worker, ballot, shard, optimizer_bytes):
                self.shard_filled(worker, ballot, shard, optimizer_bytes)
            case m.StepsDecided(worker, records):
                self.steps_decided(records)
            case m.Progress():
                self.progress(event)
            case m.ShardSaved():
                self.shard_saved(event)
            case m.CheckpointWritten(version):
                self.checkpoint_written(version)
            case m.WeightsWritten(_, version):
                self.weights = max(self.weights, version)
            case m.WaitingAtGate(worker, step):
                self.waiting_at_gate(worker, step)
            case m.FaultRequested(fault):
                self.fault_requested(fault)
            case m.Killed(worker, time, slot):
                self.killed(worker, time, slot)
            case m.Tick():
                pass

    # --- nodes and workers --------------------------------------------------------------------------------------

    def agent_up(self, event: m.AgentUp) -> None:
        before = {w.id for w in self.roster.living()}
        node, first = self.roster.node_up(event.slot, event.instance, event.host)
        self.returning.discard(event.slot)
        for worker in sorted(before - {w.id for w in self.roster.living()}):
            self.member_gone(worker, f"node {self.roster.workers[worker].node} is gone", None, "agent")
        self.persist()
        self.act(m.WelcomeAgent(event.slot, node.id))
        for info in event.workers:
            if info.worker not in self.roster.workers:
                self.roster.add_worker(info.worker, node, info)
                self.tell_peers()
        for worker in event.starting:
            if worker not in self.roster.workers:
                self.roster.add_worker(worker, node)
        for worker in first:
            self.roster.add_worker(worker, node)
            self.act(m.StartWorker(node.slot, worker))
        self.act(m.PublishStatus())

    def agent_down(self, slot: int, instance: str, time: float) -> None:
        self.returning.discard(slot)
        node = self.roster.node_in(slot)
        if node is not None and instance in ("", node.instance):
            for worker in self.roster.node_down(node.id):
                self.member_gone(worker, f"node {node.id} is gone", time, "agent")
            self.act(m.PublishStatus())
        if instance == "" and slot in self.roster.slots:
            self.act(m.StartAgent(slot))

    def worker_up(self, info: m.WorkerInfo) -> None:
        worker = self.roster.workers.get(info.worker)
        if worker is None or not worker.alive:
            return
        worker.info, worker.state, worker.optimizer_bytes = info, WorkerState.UP, info.optimizer_bytes
        self.failed_starts = 0
        if self.reference is None or not self.reference.info:
            self.reference = worker
        elif differs := difference(self.reference, info):
            if not self.members:
                self.end("failed", f"worker {info.worker} is of another numerics class: {differs}")
            else:
                refused = {"worker": info.worker, "reason": f"refused, it is of another numerics class: {differs}"}
                self.act(m.AppendEvent("member_left", refused))
                worker.state = WorkerState.DEAD
                self.act(m.KillWorker(worker.slot, worker.id))
            return
        self.tell_peers()
        self.act(m.PublishStatus())

    def tell_peers(self) -> None:
        """Everyone's address to everyone: the newer of two dials the older."""
        known = [w for w in self.roster if w.alive and w.info is not None]
        peers = [[w.id, *w.info.address] for w in known if w.info is not None]
        for worker in known:
            self.to_worker(worker.id, {"kind": "peers", "peers": peers})

    def worker_linked(self, worker: WorkerId) -> None:
        known = self.roster.workers.get(worker)
        if known is not None and known.state is WorkerState.UP:
            known.state = WorkerState.READY
            self.join_at = self.now + JOIN_DELAY_SECONDS
            self.act(m.Wake(JOIN_DELAY_SECONDS))
            self.act(m.PublishStatus())

    def worker_failed(self, worker: WorkerId, message: str, theirs: bool) -> None:
        self.failure = f"worker {worker}: {message}"
        if theirs:
            self.end("failed", message)

    def worker_gone(self, worker: WorkerId, reason: str, time: float | None, notice: str) -> None:
        known = self.roster.workers.get(worker)
        if known is None or not known.alive:
            return
        if known.state is WorkerState.STARTING:
            self.failed_starts += 1
            if self.failed_starts >= FAILED_STARTS:
                self.end("failed", self.failure or f"worker {worker} ended before it was up: {reason}")
                return
        known.state = WorkerState.DEAD
        self.member_gone(worker, reason, time, notice)
        node = self.roster.nodes[known.node]
        if node.alive and len(self.roster.living()) < self.roster.wanted():
            replacement = self.roster.new_worker_id()
            self.persist()
            self.roster.add_worker(replacement, node)
            self.act(m.StartWorker(node.slot, replacement))
        self.act(m.PublishStatus())

    def member_gone(self, worker: WorkerId, reason: str, time: float | None, notice: str) -> None:
        """Fenced: dead for good. Its work is given away only now (rule 11)."""
        if self.initialising == worker:
            self.initialising = None
        self.lost_links.pop(worker, None)
        self.suspected.pop(worker, None)
        self.unfilled = {(w, s) for w, s in self.unfilled if w != worker}
        if worker in self.members or (self.asking is not None and worker in self.asking.asked):
            self.notice(worker, time, notice)
            self.cause = self.cause or f"worker {worker} died"
            if self.recovery is not None:
                self.recovery.lost.add(worker)
                self.recovery.without(worker)
        if worker in self.members:
            self.left.add(worker)
            self.act(m.AppendEvent("member_left", {"worker": worker, "reason": reason}))

    def notice(self, worker: WorkerId, time: float | None, how: str) -> None:
        if time is None:
            return
        if self.recovery is None:
            self.recovery = Recovery(noticed=time)
            self.faults_seen += 1
            self.act(m.AppendEvent("fault_detected", {"worker": worker, "notice": how}))
        elif self.recovery.ballot is None:
            self.recovery.noticed = min(self.recovery.noticed, time)
        if self.recovery.killed is None and worker in self.kills:
            self.recovery.killed = self.kills[worker]

    def killed(self, worker: WorkerId, time: float, slot: int) -> None:
        gone = [worker] if slot < 0 else [w.id for w in self.roster if w.slot == slot]
        for each in gone:
            self.kills.setdefault(each, time)
        if self.recovery is not None and self.recovery.killed is None and self.recovery.noticed >= time:
            self.recovery.killed = time

    def link_lost(self, worker: WorkerId, peer: WorkerId, time: float) -> None:
        suspect = self.roster.workers.get(peer)
        if suspect is None or not suspect.alive or worker not in self.members or peer not in self.members:
            return
        if worker in self.lost_links.get(peer, ()):
            return
        self.link_losses[frozenset((worker, peer))] += 1
        if self.link_losses[frozenset((worker, peer))] > 2 * LINK_LOSSES:  # both ends tell of each
            self.evict(max(worker, peer), f"its link to worker {min(worker, peer)} broke {LINK_LOSSES} times")
            return
        self.lost_links.setdefault(peer, set()).add(worker)
        self.suspected.setdefault(peer, self.now)
        self.notice(peer, time, "link")
        self.cause = self.cause or f"workers {worker} and {peer} lost their link"
        self.act(m.Wake(SUSPECT_GRACE_SECONDS))

    def evict(self, worker: WorkerId, reason: str) -> None:
        known = self.roster.workers[worker]
        self.act(m.KillWorker(known.slot, worker))
        self.worker_gone(worker, reason, None, "evicted")
        self.cause = self.cause or f"worker {worker} was evicted"

    # --- asking and planning --------------------------------------------------------------------------------------

    def think(self) -> None:
        if self.ended:
            return
        self.initialise()
        self.evict_lost()
        if self.asking is not None:
            self.conclude()
        if self.asking is None and self.ballot_due():
            self.ask(self.cause)
        if self.asking is None:
            self.resend_plan()
            self.inject_due()
        self.check_end()

    def initialise(self) -> None:
        """The initial weights are computed once, by one worker, as the checkpoint of version 0."""
        if self.checkpoint is None and self.initialising is None and (ready := self.roster.ready()):
            self.initialising = ready[0].id
            self.to_worker(self.initialising, {"kind": "initialise"})

    def evict_lost(self) -> None:
        """A worker that all unsuspected members have lost is gone, with its agent or by a cut (rule 11)."""
        members = {w for w in self.members if self.roster.lives(w)}
        unsuspected = members - self.lost_links.keys()
        for suspect, reporters in list(self.lost_links.items()):
            silent = self.asking is None or suspect not in self.asking.reports
            waited = self.now - self.suspected[suspect] >= SUSPECT_GRACE_SECONDS
            if silent and waited and unsuspected and reporters >= unsuspected:
                self.evict(suspect, "all others lost their links to it")
        if self.asking is not None and self.now - self.asking.since > ASK_TIMEOUT_SECONDS:
            for worker in self.asking.asked - self.asking.reports.keys():
                if self.roster.lives(worker):
                    self.evict(worker, f"gave no report in {ASK_TIMEOUT_SECONDS:.0f} s")

    def ballot_due(self) -> bool:
        if self.checkpoint is None:
            return False
        if self.returning and self.now - self.started < RETURN_PATIENCE_SECONDS:
            return False
        ready = self.roster.ready()
        if not self.members:
            up = len(ready) >= min(self.facts.nodes * self.facts.workers_per_node, self.facts.logical_ranks)
            late = self.now - self.started > START_PATIENCE_SECONDS and len(ready) >= self.facts.min_workers
            self.cause = self.cause or "start"
            return up or late
        if not self.cause and self.joiners() and self.join_at is not None and self.now >= self.join_at:
            self.cause = "join"
        if not self.cause and self.settled_plan() and not self.unfilled and self.moving():
            self.cause = "copies are filled"
        if not self.cause and self.stop_requested and self.plan is not None and self.plan.stop_at > self.plan.version:
            self.cause = "stop"
        return bool(self.cause)

    def moving(self) -> bool:
        """Some shard has a copy too many, so that another can be retired once it is filled (rule 16)."""
        return self.plan is not None and any(len(s.backups) > 1 for s in self.plan.shards)

    def target(self) -> int:
        return min(self.facts.logical_ranks, max(1, self.roster.living_nodes() * self.facts.workers_per_node))

    def joiners(self) -> list[WorkerId]:
        """Ready workers that the job wants as members: the oldest first. The rest are standbys."""
        ready = [w.id for w in self.roster.ready()]
        staying = [w for w in ready if w in self.members]
        return [w for w in ready if w not in self.members][: max(0, self.target() - len(staying))]

    def ask(self, reason: str) -> None:
        ready = [w.id for w in self.roster.ready()]
        asked = {w for w in ready if w in self.members} | set(self.joiners())
        if len(asked) < max(1, self.facts.min_workers):
            if not self.waiting_for_workers:
                self.waiting_for_workers = True
                self.act(m.PublishStatus())
            return
        self.waiting_for_workers = False
        self.number += 1
        ballot = Ballot(self.incarnation, self.number)
        self.asking = Asking(ballot, self.now, self.now, asked, reason)
        self.cause, self.join_at = "", None
        for worker in sorted(asked):
            self.to_worker(worker, {"kind": "ask", "ballot": list(ballot)})
        self.act(m.Wake(RESEND_SECONDS))

    def reported(self, report: Report) -> None:
        if self.asking is not None and report.ballot == self.asking.ballot and report.worker in self.asking.asked:
            self.asking.reports[report.worker] = report
            self.suspected.pop(report.worker, None)
            self.lost_links.pop(report.worker, None)

    def conclude(self) -> None:
        """Plan once every asked worker has reported or is fenced (rule 11)."""
        asking = self.asking
        assert asking is not None
        living = {w for w in asking.asked if self.roster.lives(w)}
        if missing := living - asking.reports.keys():
            if self.now - asking.sent >= RESEND_SECONDS:
                asking.sent = self.now
                for worker in sorted(missing):
                    self.to_worker(worker, {"kind": "ask", "ballot": list(asking.ballot)})
                self.act(m.Wake(RESEND_SECONDS))
            return
        self.asking = None
        if len(living) < max(1, self.facts.min_workers):
            self.cause = self.cause or asking.reason
            return
        self.make_plan(asking, {w: asking.reports[w] for w in sorted(living)})

    def make_plan(self, asking: Asking, reports: dict[WorkerId, Report]) -> None:
        assert self.checkpoint is not None
        facts = self.facts
        order = Order(
            ballot=asking.ballot,
            nodes={w: self.roster.workers[w].node for w in reports},
            logical_ranks=facts.logical_ranks,
            shards=facts.shards,
            stop_at=facts.steps,
            checkpoint=self.checkpoint,
            stop_now=self.stop_requested,
        )
        before, plan = self.members, make_plan(order, reports)
        self.plan, self.members, self.cause = plan, set(plan.ids()), ""
        self.plan_sent, self.installed, self.resumed = self.now, set(), set()
        self.unfilled = {(w, s) for s, where in enumerate(plan.shards) for w in where.fill}
        self.persist()
        self.account(plan, before, reports)
        for worker in sorted(before - self.members - self.left):
            self.act(m.AppendEvent("member_left", {"worker": worker, "reason": "gone while no controller looked"}))
        self.left.clear()
        for member in plan.members:
            if member.worker not in before:
                self.act(m.AppendEvent("member_joined", {"worker": member.worker, "node": member.node}))
        self.act(m.AppendEvent("plan", plan_facts(plan, asking.reason)))
        for worker in plan.ids():
            self.to_worker(worker, {"kind": "plan", "plan": to_plain(plan)})
        self.act(m.Wake(RESEND_SECONDS))
        self.act(m.PublishStatus())

    def account(self, plan: Plan, before: set[WorkerId], reports: Mapping[WorkerId, Report]) -> None:
        """What the change cost in work done twice."""
        kept = {mm.worker for mm in plan.members if not mm.joining}
        progress = [self.roster.workers[w].progress for w in before - kept if w in self.roster.workers]
        lost = sum(done for step, done in progress if step == plan.version)
        if plan.checkpoint is not None and before:
            per_step = self.facts.logical_ranks * self.facts.micro_batches_per_rank
            furthest = max((r.step for r in reports.values() if r.plan is not None), default=plan.version)
            lost = max(0, furthest - plan.version) * per_step
            lost += sum(w.progress[1] for w in self.roster if w.id in before and w.progress[0] == furthest)
        self.recomputed += lost
        if self.recovery is not None:
            computed = {w: sum(high - low for low, high in r.computed) for w, r in reports.items()}
            handed = set()
            for worker in kept:
                now = sum(1 for w in plan.ranks_now if w == worker)
                had = self.had_ranks(worker, reports)
                if now > max(had, computed[worker]) and plan.version < plan.stop_at:
                    handed.add(worker)
            self.recovery.recomputed += lost
            self.recovery.rollback |= plan.checkpoint is not None
            self.recovery.planned(plan.ballot, kept or set(plan.ids()), handed)

    def had_ranks(self, worker: WorkerId, reports: Mapping[WorkerId, Report]) -> int:
        plan = reports[worker].plan
        if plan is None or self.plan is None:
            return 0
        ranks = plan.ranks_now if plan.version == self.plan.version else plan.ranks_next
        return sum(1 for w in ranks if w == worker)

    def resend_plan(self) -> None:
        if self.plan is None or self.now - self.plan_sent < RESEND_SECONDS:
            return
        late = [w for w in self.plan.ids() if w not in self.installed and self.roster.lives(w)]
        if late:
            self.plan_sent = self.now
            for worker in late:
                self.to_worker(worker, {"kind": "plan", "plan": to_plain(self.plan)})
            self.act(m.Wake(RESEND_SECONDS))

    def plan_installed(self, event: m.PlanInstalled) -> None:
        if self.plan is None or event.ballot != self.plan.ballot:
            return
        self.installed.add(event.worker)
        if self.recovery is not None and self.recovery.ballot == event.ballot:
            self.recovery.waiting[event.worker] = event.waiting
            self.recovery.links_opened += event.links_opened
            self.recovery.links_closed += event.links_closed

    def worker_resumed(self, event: m.Resumed) -> None:
        if self.plan is None or event.ballot != self.plan.ballot:
            return
        self.installed.add(event.worker)
        self.resumed.add(event.worker)
        self.roster.workers[event.worker].optimizer_bytes = event.optimizer_bytes
        if self.recovery is not None and self.recovery.ballot == event.ballot:
            self.recovery.resumed[event.worker] = event.time
            self.recovery.bytes_moved += event.bytes_moved
        self.close_recovery()

    def worker_recomputed(self, worker: WorkerId, ballot: Ballot, milliseconds: float) -> None:
        if self.recovery is not None and self.recovery.ballot == ballot:
            self.recovery.handed_over.discard(worker)
            self.recovery.recompute_ms = max(self.recovery.recompute_ms, milliseconds)
            self.close_recovery()

    def close_recovery(self) -> None:
        if self.recovery is not None and self.asking is None and not self.cause and self.recovery.over():
            figures = self.recovery.figures()
            self.recovery = None
            self.pause_seconds += figures["pause_ms"] / 1e3
            self.act(m.AppendEvent("recovery", figures))
            self.act(m.PublishStatus())

    def shard_filled(self, worker: WorkerId, ballot: Ballot, shard: int, optimizer_bytes: int) -> None:
        if self.plan is not None and ballot == self.plan.ballot:
            self.unfilled.discard((worker, shard))
            self.roster.workers[worker].optimizer_bytes = optimizer_bytes
            if not self.unfilled:
                self.act(m.PublishStatus())

    def settled_plan(self) -> bool:
        return self.plan is not None and self.asking is None and self.resumed >= set(self.plan.ids())

    def settled(self) -> bool:
        """Nothing under way: everyone expected is a member, every copy is filled, none is moving."""
        return (
            self.settled_plan()
            and not (self.cause or self.unfilled or self.returning or self.recovery or self.moving())
            and all(w.state is WorkerState.READY for w in self.roster.living())
            and len(self.members) >= min(self.target(), len(self.roster.ready()))
            and len(self.roster.living()) >= self.roster.wanted()
        )

    # --- records, checkpoints, the end ----------------------------------------------------------------------------

    def progress(self, event: m.Progress) -> None:
        known = self.roster.workers.get(event.worker)
        if known is not None:
            self.computed += max(0, event.total - known.computed)
            known.computed, known.progress = event.total, (event.step, event.micro_batches)

    def steps_decided(self, records: Iterable[Any]) -> None:
        self.records.update({r.step: r for r in records if r.step >= self.ledger_next})
        for record in records:
            if record.step < self.ledger_next and self.ledger_digest(record.step) not in (None, record.digest):
                self.end("failed", f"step {record.step} was decided twice with different bits")
                return
        while (record := self.records.pop(self.ledger_next, None)) is not None:
            self.act(m.AppendLedger(record))
            self.ledger_next += 1
            self.last_step = to_plain(record)
        if self.recovery is not None and self.plan is not None and self.ledger_next > self.plan.version:
            self.recovery.handed_over.clear()  # step B is decided, so it is computed
            self.close_recovery()
        self.acknowledge()
        self.act(m.PublishStatus())

    def acknowledge(self) -> None:
        for worker in sorted(self.members):
            self.to_worker(worker, {"kind": "ack", "step": self.ledger_next, "saved": self.checkpoint or 0})

    def shard_saved(self, event: m.ShardSaved) -> None:
        if self.checkpoint is not None and event.version <= self.checkpoint:
            return
        files = self.saved.setdefault(event.version, {})
        files[event.shard] = event.file
        if len(files) == self.facts.shards and event.version not in self.manifested:
            self.manifested.add(event.version)
            self.act(m.WriteManifest(event.version, dict(sorted(files.items()))))

    def checkpoint_written(self, version: int) -> None:
        self.checkpoint = max(version, self.checkpoint or 0)
        self.saved = {v: f for v, f in self.saved.items() if v > version}
        self.initialising = None
        self.act(m.AppendEvent("checkpoint", {"version": version}))
        self.acknowledge()

    def check_end(self) -> None:
        if self.plan is None or self.asking is not None or self.recovery is not None:
            return
        end = self.plan.stop_at
        if self.weights >= end and (self.checkpoint or 0) >= end and self.ledger_next >= end:
            if end >= self.facts.steps:
                self.end("done", f"{end} steps")
            else:
                self.end("stopped", f"stopped at step {end}; resume with --resume")

    def end(self, state: str, reason: str) -> None:
        if not self.ended:
            self.ended = True
            totals = {"computed": self.computed, "recomputed": self.recomputed, "faults": self.faults_seen}
            self.act(m.AppendEvent("run_ended", {"state": state, "reason": reason, **totals}))
            self.act(m.PublishStatus())
            self.act(m.End(state, reason))
            self.end_state = (state, reason)

    # --- faults -------------------------------------------------------------------------------------------------

    def waiting_at_gate(self, worker: WorkerId, step: int) -> None:
        if self.schedule.released(step):
            self.to_worker(worker, {"kind": "release", "step": step})
        else:
            self.gates[step] = self.gates.get(step, 0) + 1

    def inject_due(self) -> None:
        if self.plan is None or not self.resumed:
            return
        for waited in self.schedule.waited_for():
            if self.effect_complete(waited):
                waited.state = "over"
                self.persist()
                if self.schedule.released(waited.at_step):
                    for worker in sorted(self.members):
                        self.to_worker(worker, {"kind": "release", "step": waited.at_step})
        while (due := self.schedule.due(self.ledger_next, self.gates)) is not None:
            self.inject(due.fault, due)

    def fault_requested(self, text: str) -> None:
        try:
            self.inject(parse_fault(text), None)
        except UsageError as error:
            self.act(m.AppendEvent("fault_skipped", {"fault": text, "reason": str(error)}))

    def inject(self, fault: Fault, scheduled: Scheduled | None) -> None:
        """Recorded before it is done, so that nobody does it twice."""
        facts: dict[str, Any] = {"fault": str(fault)}
        if scheduled is not None:
            facts["index"] = scheduled.index
            scheduled.state = "injected"
            scheduled.incarnation, scheduled.nodes_before = self.incarnation, self.roster.next_node
        action = self.fault_action(fault)
        if isinstance(action, str):
            if scheduled is not None:
                scheduled.state = "over"
            self.persist()
            self.act(m.AppendEvent("fault_skipped", {**facts, "reason": action}))
            return
        self.persist()
        self.act(m.AppendEvent("fault_injected", facts))
        if action is not None:
            self.act(action)

    def fault_action(self, fault: Fault) -> Action | str | None:
        """What does the fault; a string says why its target is gone."""
        target = fault.target if fault.target is not None else -1
        match fault.kind:
            case FaultKind.KILL_WORKER:
                worker = self.roster.workers.get(target)
                if worker is None or not worker.alive:
                    return f"worker {target} is not there"
                return m.KillWorker(worker.slot, worker.id, fault=True)
            case FaultKind.KILL_AGENT | FaultKind.KILL_NODE:
                node = self.roster.nodes.get(target)
                if node is None or not node.alive:
                    return f"node {target} is not there"
                again = fault.kind is FaultKind.KILL_AGENT
                if not again:
                    self.roster.slots.discard(node.slot)
                return m.KillAgent(node.slot, again)
            case FaultKind.KILL_CONTROLLER:
                return m.KillController()
            case FaultKind.ADD_NODE:
                return m.StartAgent(self.roster.new_slot())
            case FaultKind.STOP:
                self.stop_requested = True
                return None

    def effect_complete(self, waited: Scheduled) -> bool:
        if not self.settled():
            return False
        target = waited.fault.target if waited.fault.target is not None else -1
        match waited.fault.kind:
            case FaultKind.KILL_WORKER:
                return not self.roster.workers[target].alive if target in self.roster.workers else True
            case FaultKind.KILL_NODE:
                return not self.roster.nodes[target].alive
            case FaultKind.KILL_AGENT | FaultKind.ADD_NODE:
                return any(n.alive and n.id >= waited.nodes_before for n in self.roster.nodes.values())
            case FaultKind.KILL_CONTROLLER:
                return self.incarnation > waited.incarnation
            case FaultKind.STOP:
                return True

    # --- what survives, what is shown -------------------------------------------------------------------------------

    def persist(self) -> None:
        self.act(
            m.Persist(
                {
                    "roster": self.roster.durable(),
                    "members": sorted(self.members),
                    "faults": self.schedule.durable(),
                    "stop": self.stop_requested,
                    "number": self.number,
                }
            )
        )

    def restore(self, state: Mapping[str, Any]) -> None:
        self.roster.restore(state["roster"])
        self.members = set(state["members"])
        self.schedule.restore(state["faults"])
        self.stop_requested = state["stop"]
        self.number = state["number"]

    def to_worker(self, worker: WorkerId, message: Mapping[str, Any]) -> None:
        known = self.roster.workers.get(worker)
        if known is not None and known.alive:
            self.act(m.ToWorker(known.slot, worker, message))

    def state(self) -> str:
        if self.ended:
            return self.end_state[0]
        if self.waiting_for_workers:
            return "waiting"
        if self.asking is not None or self.recovery is not None:
            return "recovering" if self.recovery is not None else "changing"
        return "training" if self.plan is not None else "starting"

    def status(self) -> dict[str, Any]:
        plan = self.plan
        members = []
        for worker in self.roster.living():
            ranks = [r for r, w in enumerate(plan.ranks_next) if w == worker.id] if plan is not None else []
            role = "member" if worker.id in self.members else "standby"
            members.append(
                {
                    "id": worker.id,
                    "node": worker.node,
                    "role": role if worker.state is WorkerState.READY else "starting",
                    "pid": worker.info.pid if worker.info is not None else None,
                    "logical_ranks": ranks,
                    "optimizer_bytes": worker.optimizer_bytes,
                }
            )
        unbacked = 0
        if plan is not None:
            unbacked = sum(all((w, s) in self.unfilled for w in x.backups) for s, x in enumerate(plan.shards))
        return {
            "state": self.state(),
            "step": self.ledger_next,
            "steps": self.facts.steps,
            "generation": plan.ballot.number if plan is not None else 0,
            "members": sorted(members, key=lambda x: x["id"]),
            "incarnation": self.incarnation,
            "last": dict(self.last_step),
            "micro_batches_computed": self.computed,
            "micro_batches_recomputed": self.recomputed,
            "faults": self.faults_seen,
            "pause_seconds": round(self.pause_seconds, 6),
            "shards_without_backup": unbacked,
            "checkpoint": self.checkpoint,
        }


def plan_facts(plan: Plan, reason: str) -> dict[str, Any]:
    return {
        "generation": plan.ballot.number,
        "step": plan.version,
        "members": list(plan.ids()),
        "reason": reason,
        "rollback": plan.checkpoint is not None and plan.version > 0,
        "behind": [mm.worker for mm in plan.members if mm.behind],
        "fills": sum(len(s.fill) for s in plan.shards),
    }


def difference(reference: Worker, info: m.WorkerInfo) -> str:
    """What differs from the reference worker's numerics class, in words; empty if nothing does."""
    if reference.info is None:
        raise InternalError("no reference for the numerics class")
    ours, theirs = reference.info.numerics, info.numerics
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return (
                f"{name} is {theirs.get(name)} there and {ours.get(name)} on worker {reference.id};"
                " use equal hosts, or set train.numerics: portable"
            )
    if reference.info.probe != info.probe:
        return f"its probe gradient differs from worker {reference.id}'s; use equal hosts, or train.numerics: portable"
    return ""


def resumed_state(durable: Mapping[str, Any], same_faults: bool) -> dict[str, Any]:
    """What a job that resumes a run keeps of its last controller: the numbers given out, the faults already done."""
    roster = {**durable["roster"], "slots": [], "reserved": [], "nodes": []}
    faults = durable["faults"] if same_faults else []
    return {**durable, "roster": roster, "members": [], "faults": faults, "stop": False}
