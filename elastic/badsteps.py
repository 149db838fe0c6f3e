"""What the controller does about a bad step: has it computed again, evicts who computes wrongly, or stops the job.

What the attempts mean is elastic/diagnosis.py; which of them decides the step is for the workers to say
(runtime/trial.py).
"""

from __future__ import annotations

from elastic import messages as m
from elastic.diagnosis import diagnose, not_reproduced
from elastic.plan import attempts_told, newest_plan
from elastic.workforce import Workforce
from runtime.protocol import Report, StepRecord, WorkerId


class BadSteps(Workforce):
    def look_into(self, reports: dict[WorkerId, Report]) -> None:
        """A ballot's reports; those of evicted workers are taken out of them."""
        step, attempts, news = attempts_told(reports)
        if not news:
            return
        newest = newest_plan(reports.values())
        alone = newest is not None and len(newest.members) == 1
        finding = diagnose(step, self.facts.global_batch, attempts, self.facts.guard, alone)
        if (step, len(attempts)) not in self.told_attempts:
            self.told_attempts.add((step, len(attempts)))
            self.act(m.AppendEvent("bad_step", finding.event))
        if finding.hopeless:
            self.end("failed", finding.hopeless)
            return
        if finding.stop:
            self.broken, self.stop_requested = finding.stop, True
        for worker, reason in not_reproduced(finding.wrong, step).items():
            reports.pop(worker, None)
            if self.roster.lives(worker):
                self.evict(worker, reason)

    def step_judged(self, record: StepRecord) -> None:
        """A step is new in the ledger."""
        if record.attempts > 1 or record.reason:
            outcome = "skipped" if record.verdict == "skip" else "reproduced"
            reason = record.reason or "these bits came out twice, from different workers"
            place = {"step": record.step, "attempt": record.attempts}
            self.act(m.AppendEvent("bad_step", {**place, "reason": reason, "outcome": outcome}))

    def evict_wrong(self, record: StepRecord) -> None:
        """Before the record is acknowledged, so that a new controller hears of it too."""
        for worker, reason in not_reproduced(record.wrong, record.step).items():
            if self.roster.lives(worker):
                self.evict(worker, reason)
