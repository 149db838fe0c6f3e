"""The controller: decides who is a member, and what happens when that changes. Pure: events and a time in, actions out.

It never sits in the step. What it does in a change is one procedure for all causes (rules 9 to 13):

    steady ──cause──▶ asking: ask(b) to every member that lives and to chosen joiners
                         │ every asked worker has reported, or is fenced (dead, or evicted and killed)
                         ▼
                      plan(b) to all its members ──every member resumed──▶ steady

Causes: a death, a lost link, a worker ready to join, a node that leaves, filled copies that let old ones retire, a slow
worker (or one that is slow no more), `stop`, and being a new incarnation. A cause that arrives while asking needs a
ballot of its own only if its worker was not asked.
Restarted, it has its small durable state (``Persist``), and the living agents tell the rest.
"""

from __future__ import annotations

from typing import Any

from dataloader.errors import UsageError
from elastic import messages as m
from elastic.ballots import Asking
from elastic.bookkeeping import Bookkeeping
from elastic.faults import Fault, FaultKind, Point, parse_fault
from elastic.injection import Scheduled, actions_of, has_acted
from elastic.messages import Action, Event
from elastic.plan import Order, make_plan
from elastic.policy import tier_of
from elastic.roster import WorkerState
from elastic.standing import standing
from elastic.workforce import ASK_TIMEOUT_SECONDS, BEAT_PERIOD_SECONDS, RETURN_PATIENCE_SECONDS
from runtime.protocol import Plan, Report, WorkerId, to_plain

RESEND_SECONDS = 1.0
SHORTEST_WAKE_SECONDS = 0.001
START_PATIENCE_SECONDS = 180.0  # for the first workers to come up, before going on with fewer


class Controller(Bookkeeping):
    """See ``ControllerState`` for what it is made from."""

    # --- entry points -----------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Action]:
        self.now = self.started = now
        if self.fresh:
            self.roster.reserve_first(self.facts.nodes)
            self.persist()
            for slot in sorted(self.roster.slots):
                self.act(m.StartAgent(slot))
            self.act(m.Wake(START_PATIENCE_SECONDS))
        else:
            self.returning = self.roster.expected_back()
            self.act(m.Wake(RETURN_PATIENCE_SECONDS))
        return self.take_actions()

    def handle(self, event: Event, now: float) -> list[Action]:
        self.now = now
        if self.ended is None:
            self.take_in(self.skews.righted(event) if isinstance(event, m.Told) else event)
            self.think()
            if isinstance(event, m.Tick):
                self.wake_again()
        return self.take_actions()

    def status(self) -> dict[str, Any]:
        return standing(self)

    def take_in(self, event: Event) -> None:
        match event:
            case m.AgentUp():
                self.agent_up(event)
            case m.AgentDown(slot, instance, time):
                self.agent_down(slot, instance, time)
            case m.Preempted():
                self.departures.noticed(self, event)
            case m.WorkerUp(info):
                self.worker_up(info)
            case m.WorkerLinked(worker, unreached):
                self.worker_linked(worker, frozenset(unreached))
            case m.AgentBeat(slot, instance, sent):
                self.skews.beat(slot, instance, sent, self.wall())
                self.agent_beat(slot, instance)
            case m.WorkerExited(worker, reason, time, notice):
                self.worker_gone(worker, reason, time, notice)
            case m.WorkerFailed(worker, message, theirs):
                self.worker_failed(worker, message, theirs)
            case m.LinkLost(worker, peer, time, dialled):
                self.link_lost(worker, peer, time, dialled)
            case m.Killed(worker, time, slot):
                self.costs.killed([worker] if slot < 0 else [w.id for w in self.roster if w.slot == slot], time)
            case m.Reported(report):
                if self.ballots.reported(report):
                    self.suspects.clear(report.worker)
            case m.PlanInstalled() | m.Resumed() | m.Recomputed() | m.ShardFilled():
                if self.ballots.current(event.ballot):
                    self.under_the_plan(event)
            case m.StepDoubted(worker, ballot, step):
                if self.ballots.current(ballot) and self.ballots.asking is None:
                    self.cause = self.cause or f"step {step} is bad"
            case m.StepsDecided(_, records):
                self.steps_decided(records)
            case m.Progress():
                self.progress(event)
            case m.ShardSaved():
                if (manifest := self.chronicle.shard_saved(event)) is not None:
                    self.reach(Point.SAVE)
                    self.act(manifest)
            case m.SaveDelayed(_, version, reason):
                self.save_delayed(version, reason)
            case m.CheckpointWritten(version):
                self.checkpoint_written(version)
            case m.WeightsWritten(_, version):
                self.chronicle.weights = max(self.chronicle.weights, version)
            case m.WaitingAtGate(worker, step):
                if self.schedule.arrive(step):
                    self.to_worker(worker, {"kind": "release", "step": step})
            case m.FaultRequested(fault):
                self.fault_requested(fault)
            case m.CannotGoOn(reason):
                self.broken, self.stop_requested = reason, True
            case m.Tick():
                pass

    def think(self) -> None:
        """Do whatever is due, now that something has changed."""
        if self.ended is None:
            self.start_missing()
            self.initialise()
            if self.deferred and not self.still_returning():
                due, self.deferred = self.deferred, []
                for fault in due:
                    self.fault_requested(fault)
            self.evict_the_gone()
            self.give_up_silent_agents()
            self.departures.gone(self)
            if self.ballots.asking is not None:
                self.conclude(self.ballots.asking)
            if self.ballots.asking is None and self.ballot_due():
                self.ask()
            if self.ballots.asking is None:
                self.resend_plan()
                self.prune_if_unused()
                self.inject_due()
                self.departures.release(self)
                self.end_if_complete()

    def wake_again(self) -> None:
        """Ticks may come early, and one may have to do for several wakes: so each asks for the next."""
        due = min((time for time in self.deadlines() if time > self.now), default=None)
        if due is not None:
            self.act(m.Wake(max(due - self.now, SHORTEST_WAKE_SECONDS)))

    def deadlines(self) -> list[float]:
        """When something is due by time alone."""
        times = self.suspects.deadlines()
        if self.agents:
            times.append(self.now + BEAT_PERIOD_SECONDS)
        if self.returning:
            times.append(self.started + RETURN_PATIENCE_SECONDS)
        if not self.ballots.members:
            times.append(self.started + START_PATIENCE_SECONDS)
        times.append(self.start_after)
        if self.join_at is not None:
            times.append(self.join_at)
        if (asking := self.ballots.asking) is not None:
            times += [asking.sent + RESEND_SECONDS, asking.since + ASK_TIMEOUT_SECONDS]
        elif not self.ballots.all_installed():
            times.append(self.ballots.sent + RESEND_SECONDS)
        return times

    # --- asking and planning --------------------------------------------------------------------------------------

    def initialise(self) -> None:
        """The initial weights are computed once, by one worker, as the checkpoint of version 0."""
        if self.chronicle.checkpoint is None and self.initialising is None and (ready := self.roster.ready()):
            staying = [w for w in ready if not self.roster.leaves(w.id)]
            self.initialising = (staying or ready)[0].id
            self.to_worker(self.initialising, {"kind": "initialise"})

    def ballot_due(self) -> bool:
        if self.chronicle.checkpoint is None:
            return False
        if self.still_returning():
            return False
        if not self.ballots.members:
            return self.may_start()
        if not self.cause and self.joiners() and (self.join_at is None or self.now >= self.join_at):
            self.cause = "join"
        if not self.cause and self.departures.handed_over(self):
            self.cause = "what leaves is handed over"
        moved = self.ballots.settled() and not self.ballots.unfilled and self.ballots.moving()
        if not self.cause and moved and not self.departures.handing_over(self):
            self.cause = "copies are filled"
        if not self.cause and self.stop_requested and (plan := self.ballots.plan) and plan.stop_at > plan.version:
            self.cause = "stop"
        leaving = any(self.roster.leaves(worker) for worker in self.ballots.members)
        if not (self.cause or leaving) and self.balance.due(self.position, self.now) and self.settled():
            self.cause = "rebalance"
            self.balance.adopt()
        return bool(self.cause)

    def may_start(self) -> bool:
        """With the job's first workers, or with fewer when one of them takes too long."""
        self.cause = self.cause or "start"
        ready = {w.id for w in self.roster.ready() if not self.roster.leaves(w.id)}
        begun = self.chronicle.ledger_next > self.begun_at  # all have left since
        if begun or self.now >= self.started + START_PATIENCE_SECONDS:
            return len(ready) >= self.facts.min_workers
        first = [w for w in self.roster.first if not self.roster.leaves(w)]
        awaited = {w for w in first if w not in self.roster.workers or self.roster.lives(w)}
        return ready >= awaited and len(ready) >= min(len(first), self.facts.logical_ranks)

    def ask(self) -> None:
        ready = {w.id for w in self.roster.ready()}
        asked = (ready & self.ballots.members) | set(self.joiners())
        if self.waiting_for_workers is self.enough(asked):
            self.waiting_for_workers = not self.waiting_for_workers
            self.act(m.PublishStatus())
        if self.waiting_for_workers:
            return
        asking = self.ballots.open(asked, self.cause, self.now)
        self.cause, self.join_at = "", None
        self.send_ask(asking, asked)

    def send_ask(self, asking: Asking, to: set[WorkerId]) -> None:
        asking.sent = self.now
        for worker in sorted(to):
            self.to_worker(worker, {"kind": "ask", "ballot": list(asking.ballot)})
        self.act(m.Wake(RESEND_SECONDS))

    def conclude(self, asking: Asking) -> None:
        """Plan once every asked worker has reported or is fenced (rule 11)."""
        if missing := asking.missing(self.roster.lives):
            if self.now >= asking.sent + RESEND_SECONDS:
                self.send_ask(asking, missing)
            return
        self.ballots.asking = None
        living = sorted(w for w in asking.asked if self.roster.lives(w))
        staying = [w for w in living if w in self.ballots.members]
        room = self.target() - sum(not self.roster.leaves(w) for w in staying)
        joining = [w for w in living if w not in self.ballots.members and not self.roster.leaves(w)][: max(0, room)]
        if self.enough({*staying, *joining}):
            self.make_plan(asking, {w: asking.reports[w] for w in sorted([*staying, *joining])})
        else:
            self.cause = self.cause or asking.reason

    def make_plan(self, asking: Asking, reports: dict[WorkerId, Report]) -> None:
        self.look_into(reports)
        if self.ended is not None:
            return
        if not self.enough(set(reports)):
            self.cause = self.cause or asking.reason
            return
        order = Order(
            ballot=asking.ballot,
            nodes={w: self.roster.workers[w].node for w in reports},
            logical_ranks=self.facts.logical_ranks,
            shards=self.facts.shards,
            stop_at=self.facts.steps,
            checkpoint=self.chronicle.checkpoint or 0,
            stop_now=self.stop_requested,
            history=self.ledger_figures(self.chronicle.checkpoint or 0, self.facts.guard.spike_window),
            leaving=frozenset(w for w in reports if self.roster.leaves(w)),
            min_workers=self.facts.min_workers,
            held=self.schedule.held(),
            slowness=self.balance.slowness,
        )
        for worker in sorted(self.unseen):
            self.gone(worker, "its agent doesn't answer the new controller", self.wall(), "agent")
        self.unseen.clear()
        before, plan = self.ballots.members, make_plan(order, reports)
        if before and plan.checkpoint is not None and self.facts.policy.holders_lost == "stop":
            self.end("failed", "every holder of a shard was lost, and policy.holders_lost is stop; go on with --resume")
            return
        self.redistributing = False
        self.ballots.adopt(plan, self.now)
        rebalanced = self.balance.planned(plan)
        self.position = plan.version
        if plan.checkpoint is not None:
            self.schedule.rewind()
        self.cause = ""
        self.costs.planned(plan, reports, self.lost_micro_batches(plan, before, reports))
        self.departures.planned(self, plan, before)
        self.persist()
        for member in plan.members:
            if member.worker not in before:
                self.act(m.AppendEvent("member_joined", {"worker": member.worker, "node": member.node}))
        facts = self.ballots.facts(asking.reason, bool(before) and plan.checkpoint is not None)
        self.act(m.AppendEvent("plan", {**facts, "tier": str(tier_of(plan, before))}))
        if rebalanced is not None:
            self.act(m.AppendEvent("rebalance", rebalanced))
        self.reach(Point.PLAN)
        self.send_plan(plan, set(plan.ids()))
        self.act(m.PublishStatus())

    def send_plan(self, plan: Plan, to: set[WorkerId]) -> None:
        self.ballots.sent = self.now
        message = {"kind": "plan", "plan": to_plain(plan)}
        for worker in sorted(to):
            self.to_worker(worker, message)
        self.act(m.Wake(RESEND_SECONDS))

    def resend_plan(self) -> None:
        plan = self.ballots.plan
        if plan is not None and self.now >= self.ballots.sent + RESEND_SECONDS:
            late = {w for w in plan.ids() if w not in self.ballots.installed and self.roster.lives(w)}
            if late:
                self.send_plan(plan, late)

    def under_the_plan(self, event: m.PlanInstalled | m.Resumed | m.Recomputed | m.ShardFilled) -> None:
        """Word from a member about the newest plan."""
        now = self.costs.now
        recovery = now if now is not None and now.ballot == event.ballot else None  # not what a later change costs
        match event:
            case m.PlanInstalled(worker, _, waiting, opened, closed):
                self.ballots.installed.add(worker)
                if recovery is not None:
                    recovery.waiting[worker] = waiting
                    recovery.links_opened += opened
                    recovery.links_closed += closed
            case m.Resumed(worker, _, time, bytes_moved, optimizer_bytes):
                self.ballots.installed.add(worker)
                self.ballots.resumed.add(worker)
                self.roster.workers[worker].optimizer_bytes = optimizer_bytes
                if recovery is not None:
                    recovery.resumed[worker] = time
                    recovery.bytes_moved += bytes_moved
            case m.Recomputed(worker, _, milliseconds):
                if now is not None:
                    now.handed_over.discard(worker)
                    now.recompute_ms = max(now.recompute_ms, milliseconds)
            case m.ShardFilled(worker, _, shard, optimizer_bytes, bytes_moved):
                self.departures.filled(bytes_moved)
                self.ballots.unfilled.discard((worker, shard))
                self.roster.workers[worker].optimizer_bytes = optimizer_bytes
        self.close_recovery()
        self.act(m.PublishStatus())

    def settled(self) -> bool:
        """Nothing under way: everyone expected is a member, every copy is filled, none is moving.

        A recovery may still be open: at a gate nobody computes what it handed over.
        """
        return (
            self.ballots.settled()
            and not (self.cause or self.ballots.unfilled or self.returning)
            and not self.ballots.moving()
            and not self.roster.leaving_nodes()
            and all(w.state is WorkerState.READY for w in self.roster.living())
            and len(self.ballots.members) >= min(self.target(), len(self.roster.ready()) - len(self.cut_off()))
            and len(self.roster.living()) >= self.roster.wanted()
        )

    # --- faults -------------------------------------------------------------------------------------------------

    def inject_due(self) -> None:
        if not self.ballots.resumed:
            return
        for waited in self.schedule.waited_for():
            if self.settled() and has_acted(waited, self.roster, self.ballots.incarnation):
                waited.state = "over"
                self.persist()
                self.release(waited.at_step)
        while (due := self.schedule.due(self.chronicle.ledger_next)) is not None:
            self.inject(due.fault, due)

    def release(self, step: int) -> None:
        """The boundary before this step, if nothing holds it any more."""
        if self.schedule.released(step):
            for worker in sorted(self.ballots.members):
                self.to_worker(worker, {"kind": "release", "step": step})

    def fault_requested(self, text: str) -> None:
        """A new controller first hears who is there; but a stop hits nobody, and must not get lost."""
        try:
            fault = parse_fault(text)
            if self.still_returning() and fault.kind is not FaultKind.STOP:
                self.deferred.append(text)
            else:
                self.inject(fault, None)
        except UsageError as error:
            self.act(m.AppendEvent("fault_skipped", {"fault": text, "reason": str(error)}))

    def inject(self, fault: Fault, scheduled: Scheduled | None) -> None:
        """Recorded before it is done, so that nobody does it twice."""
        facts: dict[str, Any] = {"fault": str(fault)}
        nodes_before = self.roster.next_node
        actions = actions_of(fault, self.roster)
        if fault.kind is FaultKind.STOP:
            self.stop_requested = True
        if scheduled is not None:
            facts["index"] = scheduled.index
            scheduled.state = "over" if isinstance(actions, str) else "injected"
            scheduled.incarnation, scheduled.nodes_before = self.ballots.incarnation, nodes_before
        self.persist()
        if isinstance(actions, str):
            self.act(m.AppendEvent("fault_skipped", {**facts, "reason": actions}))
            if scheduled is not None and scheduled.wait:
                self.release(scheduled.at_step)
            return
        self.act(m.AppendEvent("fault_injected", facts))
        if fault.kind is FaultKind.KILL_CONTROLLER and fault.during is not None:
            self.armed.append(fault)
            return
        if fault.kind is FaultKind.POISON and scheduled is not None:
            return  # workers know it from the job file
        for action in actions:
            self.act(action)
