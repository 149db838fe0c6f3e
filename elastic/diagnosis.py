"""What the reports of a ballot say about a bad step, and what follows. Pure; the rules are runtime/trial.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.guard import GuardRules, figures
from runtime.protocol import Attempt, Plan, Report, WorkerId
from runtime.trial import MOST_ATTEMPTS, WrongRanks, attempts_at, outvoted, rule


def gather(
    newest: Plan | None, counting: Collection[WorkerId], version: int, reports: Mapping[WorkerId, Report]
) -> tuple[Attempt, ...]:
    """All attempts at step `version` that didn't decide it, the newest plan's own last."""
    if newest is None:
        return ()
    before = attempts_at(newest, version)
    under = [r for w, r in sorted(reports.items()) if w in counting and r.step == version and _installed(r, newest)]
    told = next((r for r in under if r.doubted), None)
    if told is None:
        return before
    workers = newest.ranks_now if newest.version == version else newest.ranks_next
    digests = {(r.worker, rank): digest for r in under for rank, digest in r.digests}
    known = tuple(digests.get((worker, rank), b"") for rank, worker in enumerate(workers))
    return (*before, Attempt(told.doubted, workers, known, told.doubt))


def _installed(report: Report, plan: Plan) -> bool:
    return report.plan is not None and report.plan.ballot == plan.ballot


@dataclass(frozen=True, slots=True)
class Finding:
    """What the attempts at a step come to. `wrong`: who is to go for it; `stop`: why the job is to stop, if it is;
    `hopeless`: why it can't go on at all."""

    event: Mapping[str, Any] = field(default_factory=dict)
    wrong: WrongRanks = ()
    stop: str = ""
    hopeless: str = ""


def diagnose(step: int, global_batch: int, attempts: Sequence[Attempt], rules: GuardRules, alone: bool) -> Finding:
    """`attempts`: not empty; `alone`: as the workers took it to be at the last of them (runtime/trial.py)."""
    *before, last = attempts
    ruling = rule(last, before, alone)
    event = {"step": step, "attempt": len(attempts), "reason": last.bad or "no other attempt gave the same bits"}
    if ruling.data:
        loss, norm = figures(last.headers)
        samples = f"samples [{step * global_batch}, {(step + 1) * global_batch})"
        given = f"loss {loss:.6g}, gradient norm {norm:.6g}"
        line = f"step {step} is bad, and so it is when others compute it: {last.bad} ({samples}, {given})"
        return Finding({**event, "outcome": "stopped"}, ruling.wrong, f"{line}; guard.on_bad_data is stop")
    if wrong := outvoted(attempts):
        return Finding({**event, "outcome": "computed again"}, wrong)
    if len(attempts) >= MOST_ATTEMPTS:
        workers = sorted({w for a in attempts for w in a.workers})
        line = f"step {step} came out {len(attempts)} times and no two agree; workers {workers} took part"
        return Finding({**event, "outcome": "failed"}, (), "", f"{line}; one of their machines computes wrongly")
    return Finding({**event, "outcome": "computed again"})


def not_reproduced(wrong: WrongRanks, step: int) -> dict[WorkerId, str]:
    """Why each of these workers has to go."""
    ranks: dict[WorkerId, list[int]] = {}
    for worker, rank in wrong:
        ranks.setdefault(worker, []).append(rank)
    return {w: f"its gradient of rank {_listed(r)} at step {step} could not be reproduced" for w, r in ranks.items()}


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
