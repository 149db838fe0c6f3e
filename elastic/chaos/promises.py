"""Whether a run that was disturbed kept the promises (docs/architecture.md), from what was measured. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.audit import Check, Comparison
from elastic.chaos.figures import Disturbance
from elastic.faults import FaultKind
from elastic.watch import Outcome

BATCH_CHECKS = ("samples [", "tokens per step")  # how the audit's checks begin that hold the batch constant
# Of these alone a job with a backup for every shard loses nothing. A node may hold both copies of some shard for a
# while after a change, so its loss proves nothing.
COSTS_NO_STEP = frozenset({FaultKind.KILL_WORKER, FaultKind.FREEZE_WORKER, FaultKind.KILL_CONTROLLER})
NEIGHBOUR_SECONDS = 5.0  # faults so close to each other may hit the same shard


@dataclass(frozen=True, slots=True)
class Promise:
    """`finding`: the first place where it doesn't hold; `proof`: what was looked at."""

    name: str
    proof: str
    finding: str | None = None

    @property
    def kept(self) -> bool:
        return self.finding is None


def same_bits(comparison: Comparison) -> Promise:
    """Over the steps that both runs have."""
    name = "P1 same bits"
    first = comparison.first
    if first is not None:
        return Promise(name, "", f"step {first.step} differs in {first.field}: {first.a} here, {first.b} undisturbed")
    if comparison.common < comparison.lengths[0]:
        have, all_ = comparison.common, comparison.lengths[0]
        return Promise(name, f"equal over {have} of {all_} steps, which is all that the reference has")
    return Promise(name, f"all {comparison.common} steps equal the undisturbed run's")


def exactly_once(checks: Sequence[Check]) -> Promise:
    of = [check for check in checks if not check.name.startswith(BATCH_CHECKS)]
    return _of_checks("P2 exactly once", of)


def constant_batch(checks: Sequence[Check]) -> Promise:
    of = [check for check in checks if check.name.startswith(BATCH_CHECKS)]
    return _of_checks("P3 constant global batch", of)


def _of_checks(name: str, checks: Sequence[Check]) -> Promise:
    broken = next((check for check in checks if not check.holds), None)
    if broken is not None:
        return Promise(name, "", f"{broken.name}: {broken.finding}")
    return Promise(name, f"{len(checks)} checks of the audit hold")


def no_step_lost(found: Sequence[Disturbance], rollbacks: int) -> Promise:
    """A job may go back to a checkpoint only where every complete copy of some shard was lost."""
    name = "P4 no step lost"
    for number, disturbance in enumerate(found):
        if disturbance.rollback and disturbance.whole and _alone(found, number):
            return Promise(name, "", f"{disturbance.fault} cost a rollback, though every shard had a backup")
    how_many = f"{rollbacks} rollback{'' if rollbacks == 1 else 's'}"
    return Promise(name, f"{how_many}, each after several losses at once" if rollbacks else "no rollback")


def _alone(found: Sequence[Disturbance], number: int) -> bool:
    """Whether it is of a kind that costs nothing, and no other fault was near."""
    this = found[number]
    near = [d for n, d in enumerate(found) if n != number and abs(d.time - this.time) < NEIGHBOUR_SECONDS]
    return this.kind in COSTS_NO_STEP and not [d for d in near if d.kind != FaultKind.ADD_NODE]


def no_single_point(outcome: Outcome, stuck: str, undetected: Sequence[Disturbance]) -> Promise:
    """The job went on to the end, and whatever was lost was noticed."""
    name = "P7 no single point"
    if outcome.state == "failed":
        return Promise(name, "", f"the job failed: {outcome.reason}")
    if stuck:
        return Promise(name, "", stuck)
    if undetected:
        return Promise(name, "", f"{undetected[0].fault} was never noticed")
    return Promise(name, "the job went on to its end")


def nothing_left(left: Sequence[str], seen: int) -> Promise:
    name = "nothing left behind"
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        return Promise(name, "", f"{left[0]}{more}")
    return Promise(name, f"of {seen} processes, their ports, shared memory and temporary files")
