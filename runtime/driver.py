"""One worker's control thread: it owns all sockets, drives the step transaction, and does what that asks.

    agent (unix socket) ─┐                       ┌─ links to peers
                         ├─▶ transaction ─▶ actions ─▶ compute thread, writer thread
    compute results ─────┘                       └─ agent

It decides nothing about the protocol. What it keeps by itself: frames for peers whose link is not up yet, and whatever
the controller has not acknowledged (step records, saved shards), so that a dead controller leaves no gap.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from dataloader.errors import InternalError
from runtime import actions as a
from runtime import wall_clock
from runtime.comm.link import ConnectFailed, LinkDown, LinkUp, Mesh, Received, total
from runtime.comm.local import Channel
from runtime.compute_thread import Computed, ComputeThread, Failed, Measured, MicroBatchDone
from runtime.injected import point_of
from runtime.links import Links
from runtime.phases import StepClock
from runtime.protocol import (
    NO_BALLOT,
    Ballot,
    FrameKind,
    Plan,
    StepRecord,
    plan_from_plain,
    to_plain,
)
from runtime.sabotage import Sabotage
from runtime.saving import Delayed, Saved, Saver
from runtime.shards.tensors import TensorArithmetic
from runtime.step import StepTransaction
from runtime.striking import Strikes

BEAT_SECONDS = 0.1  # at least so often the agent hears that this thread lives
MEASURE_EVERY = 4  # steps, where a member was given no logical rank


class Driver:
    def __init__(
        self,
        transaction: StepTransaction,
        arithmetic: TensorArithmetic,
        mesh: Mesh,
        agent: Channel,
        compute: ComputeThread,
        saver: Saver,
        sabotage: Sabotage | None = None,
    ) -> None:
        self.tx, self.arithmetic, self.mesh, self.agent = transaction, arithmetic, mesh, agent
        self.compute, self.saver = compute, saver
        self.links = Links(mesh, transaction, self.tell)
        self.strikes = Strikes(mesh, compute, saver, sabotage or Sabotage(), self.tell)
        self.records: dict[int, StepRecord] = {}  # not acknowledged
        self.saved: list[Saved] = []  # not acknowledged
        self.incarnation = 0
        self.clock = StepClock()
        self.computed = 0
        self.computed_in_step = (-1, 0)
        self.seconds_in_step: list[float] = []  # of each of those micro-batches
        self.optimizer_bytes = 0
        self.resuming: Ballot = NO_BALLOT  # a plan that was installed and not gone on under
        self.bytes_moved = 0
        self.snapshot_bytes: dict[int, int] = {}  # by shard, of those that came
        self.counted = total(mesh.counters)  # as of the last plan
        self.handed_over: set[int] = set()
        self.resumed_at = 0.0
        self.leaving = False
        self.beat_due = 0.0

    # --- the loop -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until told to leave, when what is being written has been, or the agent is gone."""
        while not (self.leaving and self.saver.idle) and self.agent.closed is None:
            events = self.mesh.poll(self.patience())
            for event in events:
                self.on_link(event)
            for message in self.agent.receive():
                self.on_message(message)
            for outcome in self.compute.collect():
                self.on_outcome(outcome)
            for saved in self.saver.collect():
                self.on_saved(saved)
            if not events and self.tx.unsettled:
                self.do(self.tx.settle())
            self.links.dial_again()
            self.beat()

    def patience(self) -> float:
        return 0.0 if self.tx.unsettled else BEAT_SECONDS

    def beat(self, may_wait: bool = False) -> None:
        """For the agent's watch (elastic/detector.py): whoever can't say this hangs, unless it may wait."""
        now = time.monotonic()
        if now >= self.beat_due or may_wait:
            self.beat_due = now if may_wait else now + BEAT_SECONDS
            busy, usual = self.compute.pace()
            self.tell("Alive", busy_seconds=busy, usual_seconds=usual, may_wait=may_wait)

    def tell(self, kind: str, /, **fields: object) -> None:
        self.agent.send({"kind": kind, **fields})

    # --- links ------------------------------------------------------------------------------------------------

    def on_link(self, event: LinkUp | LinkDown | ConnectFailed | Received) -> None:
        match event:
            case Received(peer, frame):
                if frame.kind is FrameKind.LOST:
                    self.links.down_elsewhere(peer, frame.shard)
                    return
                if frame.kind is FrameKind.SNAPSHOT:
                    self.strikes.reach("handover")
                    self.snapshot_bytes[frame.shard] = getattr(frame.payload, "nbytes", 0)
                self.do(self.tx.on_frame(peer, frame))
            case LinkUp(peer):
                self.links.up(peer)
            case ConnectFailed(peer):
                self.links.not_reached(peer)
            case LinkDown():
                self.links.down(event)

    # --- messages from the controller, through the agent -------------------------------------------------------

    def on_message(self, message: Mapping[str, Any]) -> None:
        match message["kind"]:
            case "ask":
                ballot = Ballot(*message["ballot"])
                if ballot.incarnation > self.incarnation:
                    self.incarnation = ballot.incarnation
                    self.tell_unacknowledged()
                self.do(self.tx.on_ask(ballot))
            case "plan":
                plan = plan_from_plain(message["plan"])
                assert plan is not None
                self.on_plan(plan)
            case "peers":
                self.links.learn(message["peers"])
            case "release":
                self.resumed_at = time.monotonic()  # what was handed over could not be begun before
                self.do(self.tx.on_release(message["step"]))
            case "ack":
                self.records = {s: r for s, r in self.records.items() if s >= message["step"]}
                self.saved = [s for s in self.saved if s.version > message["saved"]]
            case "initialise":
                self.saver.initialise()
            case "leave":
                self.leaving = True
                self.compute.want(self.tx.step, ())
            case "clock":
                wall_clock.jump(message["jump_seconds"])
            case "inject":
                self.strikes.arm(message["fault"])
            case other:
                raise InternalError(f"worker {self.tx.worker}: an unknown message {other!r} from the agent")

    def on_plan(self, plan: Plan) -> None:
        before, step = self.tx.plan, self.tx.step
        self.strikes.reach("plan")
        if before is None:
            self.strikes.reach("join")
        had = self.tx.assigned() if before is not None and step < before.stop_at else set()
        waiting = not self.compute.busy
        if plan.checkpoint is not None:  # read here and now, from a store that may be slow
            self.beat(may_wait=True)
        actions = self.tx.on_plan(plan)
        if self.tx.plan is not plan:
            return
        me = plan.member(self.tx.worker)
        assert me is not None
        self.links.edit(plan, before)
        self.resuming, self.bytes_moved = plan.ballot, 0
        now = {rank for rank, worker in enumerate(plan.ranks_now) if worker == self.tx.worker}
        keeps_on = not me.joining and plan.checkpoint is None and step == plan.version < plan.stop_at
        self.handed_over = ((self.handed_over & now) | (now - had)) - self.tx.work.keys() if keeps_on else set()
        for action in actions:
            if isinstance(action, a.Send) and action.frame.kind is FrameKind.PARAMETERS:
                self.bytes_moved += action.frame.payload.nbytes
        if not any(isinstance(action, a.Compute) for action in actions):
            self.compute.want(self.tx.step, ())
        after = total(self.mesh.counters)
        self.tell(
            "PlanInstalled",
            ballot=list(plan.ballot),
            waiting=waiting,
            links_opened=after.links_opened - self.counted.links_opened,
            links_closed=after.links_closed - self.counted.links_closed,
        )
        self.counted = after
        computing: list[a.Action] = [action for action in actions if isinstance(action, a.Compute)]
        self.do(computing)  # it goes on from here, and tells so; what there is to send is work of the new plan
        self.do([action for action in actions if not isinstance(action, a.Compute)])
        if self.tells(plan):
            self.tell_unacknowledged()

    def tells(self, plan: Plan) -> bool:
        """One member tells what all know: the lowest that was there before, since a joiner lacks the older records."""
        return self.tx.worker == min(plan.members, key=lambda member: (member.joining, member.worker)).worker

    def tell_unacknowledged(self) -> None:
        """To a new controller, or as the one who tells from now on."""
        if self.records:
            self.tell("StepsDecided", records=[to_plain(self.records[s]) for s in sorted(self.records)])
        for saved in self.saved:
            self.tell_saved(saved)

    def resume_if_there(self) -> None:
        plan = self.tx.plan
        if self.resuming == NO_BALLOT or plan is None or plan.ballot != self.resuming:
            return
        if self.tx.bare or self.tx.step < plan.version:
            return
        self.resuming = NO_BALLOT
        self.resumed_at = time.monotonic()
        self.tell(
            "Resumed",
            ballot=list(plan.ballot),
            time=time.time(),
            bytes_moved=self.bytes_moved,
            optimizer_bytes=self.arithmetic.optimizer_bytes(),
        )

    # --- what the transaction asks for ---------------------------------------------------------------------------

    def do(self, actions: list[a.Action]) -> None:
        for action in actions:
            if self.strikes and (point := point_of(action)) is not None:
                self.strikes.reach(point)
            self.act(action)
        self.clock.look(self.tx, time.monotonic())
        self.resume_if_there()

    def act(self, action: a.Action) -> None:
        match action:
            case a.Send(to, frame):
                self.links.send(to, frame)
            case a.Compute(step, ranks):
                self.compute.want(step, ranks)
            case a.SendReport(report):
                self.tell("Reported", report=to_plain(report))
            case a.Doubted(ballot, step):
                self.tell("StepDoubted", ballot=list(ballot), step=step)
            case a.Decided(record):
                self.on_decided(record)
            case a.Save(version, shards):
                for shard, snapshot in shards:
                    self.saver.save(version, shard, snapshot)
            case a.Filled(ballot, shard):
                held = self.arithmetic.optimizer_bytes()
                moved = self.snapshot_bytes.pop(shard, 0)
                self.tell("ShardFilled", ballot=list(ballot), shard=shard, optimizer_bytes=held, bytes_moved=moved)
            case a.AtGate(step):
                self.tell("WaitingAtGate", step=step)
            case a.Ended(version):
                plan = self.tx.plan
                if plan is not None and self.tells(plan):
                    self.saver.write_weights(version, self.arithmetic.staged)

    def on_decided(self, record: StepRecord) -> None:
        now = time.monotonic()
        seconds, phases = self.clock.decided(now)
        record = replace(record, time=time.time(), seconds=seconds, phases=phases)
        self.records[record.step] = record
        plan = self.tx.plan
        if plan is not None and self.tells(plan):
            self.tell("StepsDecided", records=[to_plain(record)])
        if plan is not None and self.tx.worker not in plan.ranks_next and record.step % MEASURE_EVERY == 0:
            self.compute.measure()

    # --- what the other threads bring --------------------------------------------------------------------------

    def on_outcome(self, outcome: Computed | Failed | MicroBatchDone | Measured) -> None:
        match outcome:
            case MicroBatchDone(step, seconds):
                self.begin_counting(step)
                self.computed += 1
                self.computed_in_step = (step, self.computed_in_step[1] + 1)
                self.seconds_in_step.append(seconds)
                self.tell_progress(median(self.seconds_in_step))
            case Measured(seconds):
                self.begin_counting(self.tx.step)
                self.tell_progress(seconds)
            case Failed(error):
                raise error
            case Computed(step, rank, gradient, work):
                if not self.tx.wants(step, rank):
                    self.arithmetic.give_back(gradient)
                    return
                if self.tx.missing() == (rank,):
                    self.strikes.reach("reduce")  # an owner's own contribution is never sent
                self.arithmetic.keep(rank, gradient)
                self.do(self.tx.on_computed(step, rank, work))
                self.recomputed(rank)

    def begin_counting(self, step: int) -> None:
        if self.computed_in_step[0] != step:
            self.computed_in_step, self.seconds_in_step = (step, 0), []
            self.optimizer_bytes = self.arithmetic.optimizer_bytes()

    def tell_progress(self, micro_batch_seconds: float) -> None:
        step, in_step = self.computed_in_step
        self.tell(
            "Progress",
            step=step,
            micro_batches=in_step,
            total=self.computed,
            optimizer_bytes=self.optimizer_bytes,
            micro_batch_seconds=micro_batch_seconds,
        )

    def recomputed(self, rank: int) -> None:
        if rank in self.handed_over:
            self.handed_over.discard(rank)
            if not self.handed_over and self.tx.plan is not None:
                milliseconds = (time.monotonic() - self.resumed_at) * 1e3
                self.tell("Recomputed", ballot=list(self.tx.plan.ballot), milliseconds=milliseconds)

    def on_saved(self, saved: Saved | Delayed) -> None:
        if isinstance(saved, Delayed):
            self.tell("SaveDelayed", version=saved.version, reason=saved.reason)
            return
        if saved.error is not None:
            raise saved.error
        self.saved.append(saved)
        self.tell_saved(saved)

    def tell_saved(self, saved: Saved) -> None:
        if saved.file is not None:
            self.tell("ShardSaved", version=saved.version, shard=saved.shard, file=dict(saved.file))
        elif saved.weights:
            self.tell("WeightsWritten", version=saved.version)
        else:
            self.tell("CheckpointWritten", version=saved.version)
