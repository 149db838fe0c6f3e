"""How many logical ranks each member runs: by how fast it is, as measured, and only where a change pays. Pure.

Measured are the wall-clock seconds of each member's micro-batches: one figure per step, the median of that step's.

    no evidence ──WINDOW steps of every member──▶ a better map? ──so for STEADY_STEPS steps and some seconds──▶ due
         ▲                                             │ no: begin again                                        │
         └──────────────────────── any plan ◀──────────┴──────────────────────── a ballot, cause "rebalance" ◀──┘

Why nothing goes to and fro:
- A member is either as fast as is usual here (*slowness* 1, also if it is a little slower or faster) or it isn't; only
  a decision changes what is believed of it, and every later plan (a death, a joiner) goes by the same beliefs.
- A change has to save `threshold` of a whole step's seconds, not of the computing alone, and enough steps have to be
  left for it. Its gain is measured; one that brought less than half doubles the time until the next.
A change of the map moves no state, and which worker runs a logical rank decides no bit.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from statistics import median, median_low
from typing import Any, TypeAlias

from elastic.placement import spread
from runtime.protocol import Plan, WorkerId

WINDOW = 9  # steps that are looked at
EVIDENCE = 5  # of them that a member must have been measured in; fewer where `every` is less
STEADY_STEPS = 10  # in a row for which a change would have paid; the same
USUAL = 0.25  # slower or faster by no more than this share is as fast as is usual
TRIAL_STEPS = 5  # after which its gain is told
MOST_PATIENT = 4  # times that `every` is doubled

Slowness: TypeAlias = Mapping[WorkerId, float]  # of those that are not as fast as is usual, relative to that
Counts: TypeAlias = dict[WorkerId, int]  # logical ranks by worker


@dataclass(frozen=True)
class Terms:
    """The job file's `balance`, with its defaults."""

    enabled: bool = True
    threshold: float = 0.15  # of a step's seconds that a change must save
    every: int = 20  # steps between two changes, at least; and that must be left for one
    patience_seconds: float = 5.0  # for which it must have looked so


NEVER = Terms(enabled=False)


# --- maps -------------------------------------------------------------------------------------------------------------


def share(ranks: int, workers: Sequence[WorkerId], slowness: Slowness) -> Counts:
    """Logical ranks by worker so that the last to be done is done as early as can be. May be 0.

    One after another goes to whoever would be done with it first: for equal pieces that is the best there is.
    """
    queue = [(slowness.get(worker, 1.0), place) for place, worker in enumerate(workers)]
    heapify(queue)
    counts = dict.fromkeys(workers, 0)
    for _ in range(ranks):
        _, place = queue[0]
        worker = workers[place]
        counts[worker] += 1
        heapreplace(queue, ((counts[worker] + 1) * slowness.get(worker, 1.0), place))
    return counts


def spread_by_speed(ranks: int, workers: Sequence[WorkerId], slowness: Slowness) -> tuple[WorkerId, ...]:
    """Logical rank -> worker: contiguous blocks, since whole subtrees are added up before they are sent."""
    if not any(worker in slowness for worker in workers):
        return spread(ranks, workers)
    counts = share(ranks, workers, slowness)
    return tuple(worker for worker in workers for _ in range(counts[worker]))


def makespan(counts: Mapping[WorkerId, int], seconds: Mapping[WorkerId, float]) -> float:
    """When the last of them is done."""
    return max(count * seconds[worker] for worker, count in counts.items())


def typical(values: Sequence[float]) -> float:
    """What two thirds of them reach: who is disturbed now and then is not slow."""
    return sorted(values)[len(values) // 3]


def slowness_of(seconds: Mapping[WorkerId, float]) -> dict[WorkerId, float]:
    """Of those that aren't as fast as is usual among them."""
    usual = median_low(seconds.values())
    relative = {worker: value / usual for worker, value in seconds.items()}
    return {w: round(r, 2) for w, r in relative.items() if not 1.0 / (1.0 + USUAL) <= r <= 1.0 + USUAL}


def counts_of(ranks: Iterable[WorkerId], members: Iterable[WorkerId]) -> Counts:
    given = Counter(ranks)
    return {worker: given[worker] for worker in members}


# --- when to change ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proposal:
    slowness: dict[WorkerId, float]
    step_seconds: float  # as they are
    predicted_seconds: float  # as they would be


@dataclass(slots=True)
class Trial:
    """A change whose gain is being measured."""

    proposal: Proposal
    after_step: int
    seconds: list[float] = field(default_factory=list)


class Balance:
    """Fed with what is measured and decided; `due` says whether a ballot is to change the map."""

    def __init__(self, terms: Terms, logical_ranks: int, micro_batches_per_rank: int, steps: int) -> None:
        self.terms = terms
        self.logical_ranks, self.micro_batches_per_rank, self.steps = logical_ranks, micro_batches_per_rank, steps
        self.slowness: dict[WorkerId, float] = {}  # believed, and what plans go by
        self.changed_at = -1  # the step in which the newest plan was made
        self.moved_at: int | None = None  # the step of the last change of this map; of the start, before any
        self.in_vain = 0  # changes in a row that brought too little
        self._plan: Plan | None = None
        self._measured: dict[WorkerId, deque[tuple[int, float]]] = {}
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._steady: tuple[int, float] | None = None  # since when a change would have paid: step, time
        self._proposal: Proposal | None = None
        self._adopted: Proposal | None = None  # by the ballot that is under way
        self._trial: Trial | None = None

    # --- in ---------------------------------------------------------------------------------------------------------

    def measured(self, worker: WorkerId, step: int, micro_batch_seconds: float) -> None:
        if micro_batch_seconds <= 0.0 or step <= self.changed_at:
            return  # of the map before
        known = self._measured.setdefault(worker, deque(maxlen=WINDOW))
        if known and known[-1][0] >= step:
            known.pop()
        known.append((step, micro_batch_seconds))

    def decided(self, step: int, seconds: float, now: float) -> dict[str, Any] | None:
        """A step of the newest plan was decided. What the last change has brought, if that is known now."""
        if self._plan is None or step <= self.changed_at + 1:  # the first under a new map waits for who is behind
            return None
        self._steps.append(seconds)
        self._proposal = self._better()
        if self._proposal is None:
            self._steady = None
        elif self._steady is None:
            self._steady = (step, now)
        return self._tried(step, seconds)

    def planned(self, plan: Plan) -> dict[str, Any] | None:
        """A plan was made, by the beliefs held here. The change of the map, if it is one's outcome."""
        before, self._plan = self._plan, plan
        self.changed_at = plan.version
        self.moved_at = plan.version if self.moved_at is None else min(self.moved_at, plan.version)
        self._measured.clear()
        self._steps.clear()
        self._steady = self._proposal = self._trial = None
        adopted, self._adopted = self._adopted, None
        if adopted is None or before is None or before.ids() != plan.ids():  # who came or went has changed more
            return None
        self._trial = Trial(adopted, plan.version + 1)
        self.moved_at = plan.version
        return {
            "from": _plain(counts_of(before.ranks_next, before.ids())),
            "to": _plain(counts_of(plan.ranks_next, plan.ids())),
            "slowness": {str(worker): value for worker, value in sorted(adopted.slowness.items())},
            "step_seconds": round(adopted.step_seconds, 6),
            "predicted_seconds": round(adopted.predicted_seconds, 6),
        }

    # --- out --------------------------------------------------------------------------------------------------------

    def due(self, step: int, now: float) -> bool:
        """`step`: the next to be decided."""
        if self._steady is None or self.moved_at is None or not self.terms.enabled:
            return False
        since_step, since = self._steady
        return (
            step - since_step >= min(STEADY_STEPS, self.terms.every)
            and now - since >= self.terms.patience_seconds
            and step - self.moved_at >= self.terms.every * 2**self.in_vain
            and self.steps - step >= self.terms.every
        )

    def adopt(self) -> None:
        """The next plan is made by what was found."""
        if self._proposal is not None:
            self._adopted, self.slowness = self._proposal, self._proposal.slowness

    def durable(self) -> dict[str, Any]:
        """For a new controller, which has no evidence of its own yet."""
        return {
            "slowness": sorted([worker, value] for worker, value in self.slowness.items()),
            "moved_at": self.moved_at,
            "in_vain": self.in_vain,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.slowness = dict(state["slowness"])
        self.moved_at, self.in_vain = state["moved_at"], state["in_vain"]

    # --- judging ------------------------------------------------------------------------------------------------------

    def _better(self) -> Proposal | None:
        plan = self._plan
        assert plan is not None
        seconds = {}
        for worker in plan.ids():
            known = self._measured.get(worker, ())
            if len(known) < min(EVIDENCE, self.terms.every):
                return None
            seconds[worker] = typical([value for _, value in known]) * self.micro_batches_per_rank
        slowness = slowness_of(seconds)
        wanted = counts_of(spread_by_speed(self.logical_ranks, plan.ids(), slowness), plan.ids())
        computing = makespan(counts_of(plan.ranks_next, plan.ids()), seconds)
        step = max(median(self._steps), computing)
        predicted = step - (computing - makespan(wanted, seconds))
        return Proposal(slowness, step, predicted) if predicted <= step * (1.0 - self.terms.threshold) else None

    def _tried(self, step: int, seconds: float) -> dict[str, Any] | None:
        trial = self._trial
        if trial is None or step <= trial.after_step:
            return None
        trial.seconds.append(seconds)
        if len(trial.seconds) < TRIAL_STEPS:
            return None
        self._trial = None
        before, predicted, after = trial.proposal.step_seconds, trial.proposal.predicted_seconds, median(trial.seconds)
        paid = before - after >= (before - predicted) / 2
        self.in_vain = 0 if paid else min(self.in_vain + 1, MOST_PATIENT)
        return {
            "before_seconds": round(before, 6),
            "predicted_seconds": round(predicted, 6),
            "after_seconds": round(after, 6),
            "gain": round(1.0 - after / before, 4),
        }


def _plain(counts: Counts) -> dict[str, int]:
    return {str(worker): count for worker, count in sorted(counts.items())}
