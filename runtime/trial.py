"""Bad steps: a step whose figures are bad is computed again, by other workers, before anything of it is applied.

    records of all backups ──figures are well──▶ certified
        │ bad, or one of several attempts of which no two agree
        ▼
    doubted ──the controller asks; the plan carries all attempts, and gives each rank to another worker──▶ next attempt

Two attempts agree when they have the same bits and no logical rank's gradient rests on one worker's word (unless there
is but one). Then the step is decided: with good figures it commits; with bad ones the data or the hyperparameters did
it, and the job's policy says what follows. Attempts that differ were the hardware's doing: who gave a gradient that two
others contradict is wrong. Pure: a ruling follows from a plan and the records made under it, so all members come to
the same one, and one generation can't both decide a step and doubt it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from runtime.actions import Doubted
from runtime.guard import GuardRules, what_is_bad
from runtime.protocol import Attempt, Certificate, Header, Plan, WorkerId

if TYPE_CHECKING:
    from runtime.step import StepTransaction

# So many attempts show no more. Of two workers that contradict each other for good, the one with good figures is
# believed; where all attempts were bad and no rank's gradient was ever contradicted, it was the data.
LONG = 4
MOST_ATTEMPTS = 6  # then the job ends

WrongRanks: TypeAlias = tuple[tuple[WorkerId, int], ...]


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the records of one attempt come to. `data`: this is what the data give, however often it is computed."""

    bad: str
    data: bool
    wrong: WrongRanks = ()

    def decides(self, rules: GuardRules) -> bool:
        return self.data and (not self.bad or rules.on_bad_data == "skip")


def rule(now: Attempt, before: Sequence[Attempt], alone: bool) -> Ruling:
    """`now.digests` may be empty; `alone`: there is one member only, so nobody else can compute anything."""
    if not before:
        return Ruling(now.bad, not now.bad)
    same = [attempt for attempt in before if attempt.headers == now.headers]
    long = len(before) + 1 >= LONG
    if same and (alone or _by_several(now, same) or (long and not now.bad)):
        return Ruling(now.bad, True, _contradicted(before, same))
    never_well = long and bool(now.bad) and all(attempt.bad for attempt in before)
    return Ruling(now.bad, never_well and all(len(known) < 2 for known in _by_rank(before)))


def _by_several(now: Attempt, same: Sequence[Attempt]) -> bool:
    """Whether each rank's gradient was computed by two workers at least."""
    return all(len(set(workers)) > 1 for workers in zip(now.workers, *(a.workers for a in same), strict=True))


def _contradicted(before: Sequence[Attempt], right: Sequence[Attempt]) -> WrongRanks:
    """What differs from the attempts that were right, as far as digests were told."""
    wrong = {
        (worker, rank)
        for attempt in before
        for rank, (worker, digest) in enumerate(zip(attempt.workers, attempt.digests, strict=True))
        if digest and any(r.digests[rank] not in (b"", digest) for r in right)
    }
    return tuple(sorted(wrong))


def _by_rank(attempts: Sequence[Attempt]) -> list[dict[bytes, set[WorkerId]]]:
    """By logical rank: digest -> who came to it."""
    found: list[dict[bytes, set[WorkerId]]] = []
    for rank in range(len(attempts[0].workers)):
        known: dict[bytes, set[WorkerId]] = {}
        for attempt in attempts:
            if attempt.digests[rank]:
                known.setdefault(attempt.digests[rank], set()).add(attempt.workers[rank])
        found.append(known)
    return found


def outvoted(attempts: Sequence[Attempt]) -> WrongRanks:
    """(worker, rank) of gradients that two others contradict, before any two attempts agree as a whole."""
    wrong: set[tuple[WorkerId, int]] = set()
    for rank, known in enumerate(_by_rank(attempts) if attempts else []):
        right = [digest for digest, workers in known.items() if len(workers) > 1]
        if len(right) == 1:
            wrong |= {(w, rank) for digest, workers in known.items() if digest != right[0] for w in workers}
    return tuple(sorted(wrong))


def other_workers(attempts: Sequence[Attempt], members: Sequence[WorkerId]) -> tuple[WorkerId, ...]:
    """Who computes each logical rank in the next attempt: never the one of the last if there is another, those first
    that have not computed it yet, and evenly."""
    load = dict.fromkeys(members, 0)
    chosen = []
    for rank, last in enumerate(attempts[-1].workers):
        times = Counter(attempt.workers[rank] for attempt in attempts)
        worker = min(members, key=lambda w: (w == last, times[w], load[w], w))
        load[worker] += 1
        chosen.append(worker)
    return tuple(chosen)


def attempts_at(plan: Plan | None, step: int) -> tuple[Attempt, ...]:
    """Earlier attempts at this step, under this plan."""
    return plan.attempts if plan is not None and plan.version == step else ()


def conclude(tx: StepTransaction, headers: tuple[Header, ...]) -> None:
    """All records of the step are here."""
    plan = tx.installed()
    before = attempts_at(plan, tx.step)
    bad = what_is_bad(headers, tx.history, tx.facts.guard)
    now = Attempt(headers, plan.ranks_now if tx.step == plan.version else plan.ranks_next, (), bad)
    ruling = rule(now, before, alone=len(plan.members) == 1)
    if ruling.decides(tx.facts.guard):
        tx.certify(Certificate(tx.step, headers, ruling.bad, len(before) + 1, ruling.wrong))
    else:
        tx.doubted, tx.doubt = headers, bad
        tx.act(Doubted(plan.ballot, tx.step))
