"""What a run leaves behind and what its failures cost, as the controller learns of it: records, checkpoints, the end.

Nothing here decides who is a member (elastic/workforce.py, elastic/controller.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from elastic import messages as m
from elastic.badsteps import BadSteps
from runtime.protocol import Plan, Report, StepRecord, WorkerId, to_plain


class Bookkeeping(BadSteps):
    def progress(self, event: m.Progress) -> None:
        known = self.roster.workers.get(event.worker)
        if known is not None:
            self.computed += max(0, event.total - known.computed)
            known.computed, known.progress = event.total, (event.step, event.micro_batches)
            known.optimizer_bytes, known.micro_batch_seconds = event.optimizer_bytes, event.micro_batch_seconds
            self.balance.measured(event.worker, event.step, event.micro_batch_seconds)

    def steps_decided(self, records: tuple[StepRecord, ...]) -> None:
        if (step := self.chronicle.contradicts(records)) is not None:
            self.end("failed", f"step {step} was decided twice with different bits")
            return
        of_this_plan = [r.step + 1 for r in records if r.generation == self.ballots.number]
        self.position = max(of_this_plan, default=self.position)
        for record in records:
            self.evict_wrong(record)
        for record in self.chronicle.decided(records):
            self.act(m.AppendLedger(record))
            self.step_judged(record)
            self.deaths_in_place = 0
            self.agents_in_place.clear()
            self.last_step = to_plain(record)
            self.weigh(record)
        plan = self.ballots.plan
        if self.costs.now is not None and plan is not None and self.chronicle.ledger_next > plan.version:
            self.costs.now.handed_over.clear()  # step B is decided, so it is computed
            self.close_recovery()
        self.acknowledge()
        self.act(m.PublishStatus())

    def weigh(self, record: StepRecord) -> None:
        """Whether moving work pays, and whether it did."""
        if record.generation == self.ballots.number:
            gain = self.balance.decided(record.step, record.seconds, self.now)
            if gain is not None:
                self.act(m.AppendEvent("rebalance_gain", gain))

    def checkpoint_written(self, version: int) -> None:
        if self.chronicle.checkpoint_written(version):
            self.initialising = None
            self.prune_due = True
            self.act(m.AppendEvent("checkpoint", {"version": version}))
        self.acknowledge()

    def save_delayed(self, version: int, reason: str) -> None:
        """Told once of each version, whoever else can't write."""
        if version not in self.delayed_saves:
            self.delayed_saves.add(version)
            self.act(m.AppendEvent("save_failed", {"version": version, "reason": f"{reason}; tried again"}))

    def prune_if_unused(self) -> None:
        """Old checkpoints go, but not while the members of a rollback may still be reading one."""
        plan = self.ballots.plan
        reading = plan is not None and plan.checkpoint is not None and not self.ballots.settled()
        if self.prune_due and not reading:
            self.prune_due = False
            self.act(m.PruneCheckpoints())

    def acknowledge(self) -> None:
        saved = self.chronicle.checkpoint if self.chronicle.checkpoint is not None else -1
        for worker in sorted(self.ballots.members | ({self.initialising} if self.initialising is not None else set())):
            self.to_worker(worker, {"kind": "ack", "step": self.chronicle.ledger_next, "saved": saved})

    def end_if_complete(self) -> None:
        begun = self.ballots.members or self.chronicle.ledger_next > self.begun_at
        if self.stop_requested and self.ballots.plan is None and not begun:
            self.end_early("stopped before it had begun")
            return
        if self.stop_requested and not self.roster.living() and not self.still_returning():
            if self.chronicle.checkpoint is not None:  # all that is left, whoever may still come
                self.end_early(f"no worker lives; go on from step {self.chronicle.checkpoint} with --resume")
            return
        plan = self.ballots.plan
        if plan is not None and self.costs.now is None and self.chronicle.complete(plan.stop_at):
            if plan.stop_at >= self.facts.steps:
                self.end("done", f"{plan.stop_at} steps")
            elif self.stop_requested:
                self.end_early(f"stopped at step {plan.stop_at}; go on with --resume")

    def end_early(self, where: str) -> None:
        if self.broken:
            self.end("failed", f"{self.broken}; {where}")
        else:
            self.end("stopped", f"{self.stop_reason}; {where}" if self.stop_reason else where)

    # --- what failures cost ---------------------------------------------------------------------------------------

    def close_recovery(self) -> None:
        figures, paused = self.costs.close()
        if paused:
            self.persist()
        if figures is not None:
            self.act(m.AppendEvent("recovery", figures))

    def lost_micro_batches(self, plan: Plan, before: set[WorkerId], reports: Mapping[WorkerId, Report]) -> int:
        """What was computed, as far as was told, and will be computed again."""
        kept = {member.worker for member in plan.members if not member.joining}
        if plan.checkpoint is None:
            progress = [self.roster.workers[w].progress for w in before - kept if w in self.roster.workers]
            return sum(done for step, done in progress if step == plan.version)
        members = [w for w in self.roster if w.id in before]
        reached = [r.step for r in reports.values() if r.plan is not None] + [w.progress[0] for w in members]
        furthest = max([plan.version, self.chronicle.ledger_next, *reached])
        whole = max(0, furthest - plan.version) * self.facts.logical_ranks * self.facts.micro_batches_per_rank
        return whole + sum(w.progress[1] for w in members if w.progress[0] == furthest >= plan.version)
