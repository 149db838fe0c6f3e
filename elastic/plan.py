"""The planner: reports in, plan out. A pure function (rules 12, 13, 16, 17).

``make_plan`` decides where to go on and who counts; ``place_shards`` decides who holds what, and moves as few bytes
as it can: complete copies stay or are promoted, and only a shard without a second complete copy, or a lopsided
load, has one filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elastic.balance import Slowness, spread_by_speed
from elastic.diagnosis import gather
from elastic.placement import place_shards
from runtime.protocol import (
    Attempt,
    Ballot,
    Certificate,
    Figures,
    HoldingReport,
    Member,
    Plan,
    Report,
    WorkerId,
)
from runtime.trial import attempts_at, other_workers


@dataclass(frozen=True, slots=True)
class Order:
    """What the controller wants of a plan, besides what the reports say."""

    ballot: Ballot
    nodes: Mapping[WorkerId, int]  # where each asked worker runs
    logical_ranks: int
    shards: int
    stop_at: int
    checkpoint: int  # the newest complete checkpoint's version
    stop_now: bool = False  # end at the version the plan goes on from
    history: tuple[Figures, ...] = ()  # of the last committed steps before the checkpoint
    leaving: frozenset[WorkerId] = frozenset()  # whose nodes go away: they are to hold nothing in the end
    min_workers: int = 1
    held: frozenset[int] = frozenset()  # steps that nobody begins yet
    slowness: Slowness = field(default_factory=dict)

    def staying(self, workers: Iterable[WorkerId]) -> list[WorkerId]:
        """Those who get the pieces: all but who leaves, unless too few would stay."""
        stays = sorted(set(workers) - self.leaving)
        return stays if len(stays) >= self.min_workers else sorted(workers)

    def parks(self, workers: Iterable[WorkerId]) -> bool:
        """Too few stay to go on: what is known goes to a checkpoint at the next step boundary."""
        return not self.leaving.isdisjoint(workers) and len(set(workers) - self.leaving) < self.min_workers


def make_plan(order: Order, reports: Mapping[WorkerId, Report]) -> Plan:
    newest = newest_plan(reports.values())
    counting = who_counts(newest, reports)
    version = max((reports[w].reached for w in counting), default=-1)
    complete = [
        {w for w in counting if any(h.shard == s and reaches(h, version) for h in reports[w].holdings)}
        for s in range(order.shards)
    ]
    if newest is None or not counting or not all(complete):
        return start_plan(order, reports)
    staying, attempts = order.staying(reports), gather(newest, counting, version, reports)
    ranks_now = assign_now(order, newest, version, {w: reports[w] for w in sorted(counting)}, attempts)
    needed = {*staying, *ranks_now} if handed_over(complete, staying) else reports.keys()
    workers = sorted(needed)
    return Plan(
        ballot=order.ballot,
        members=tuple(member(w, reports[w], w in counting, version, order.nodes) for w in workers),
        version=version,
        certificate=certificate_before(version, [reports[w] for w in sorted(counting)]),
        checkpoint=None,
        shards=place_shards(staying, order.nodes, complete, newest.shards, needed - set(staying)),
        ranks_now=ranks_now,
        ranks_next=spread_by_speed(order.logical_ranks, staying, order.slowness),
        stop_at=stop_at(order, version, int(version not in order.held) if order.parks(reports) else None),
        attempts=attempts,
        history=next(reports[w].history for w in sorted(counting) if reports[w].reached == version),
    )


def handed_over(complete: Iterable[set[WorkerId]], staying: Sequence[WorkerId]) -> bool:
    """Whether those who stay have all copies that there are to be, so that the others may go (rule 16)."""
    return all(len(copies.intersection(staying)) >= min(2, len(staying)) for copies in complete)


def stop_at(order: Order, version: int, steps_left: int | None) -> int:
    """Who parks ends the step that it has begun, so that nothing of it is computed again."""
    last = max(order.stop_at, version)
    if order.stop_now:
        return version
    return last if steps_left is None else min(last, version + steps_left)


def attempts_told(reports: Mapping[WorkerId, Report]) -> tuple[int, tuple[Attempt, ...], bool]:
    """(step, attempts at it so far, whether the newest plan doesn't know the last of them)."""
    newest = newest_plan(reports.values())
    counting = who_counts(newest, reports)
    version = max((reports[w].reached for w in counting), default=-1)
    attempts = gather(newest, counting, version, reports)
    return version, attempts, len(attempts) > len(attempts_at(newest, version))


def newest_plan(reports: Iterable[Report]) -> Plan | None:
    return max((r.plan for r in reports if r.plan is not None), key=lambda p: p.ballot, default=None)


def who_counts(newest: Plan | None, reports: Mapping[WorkerId, Report]) -> set[WorkerId]:
    """Rule 12. All others are joiners with empty hands, whatever they hold."""
    if newest is None:
        return set()
    counting = set()
    for worker, report in reports.items():
        listed = newest.member(worker)
        if report.plan is None or listed is None:
            continue
        if report.plan.ballot == newest.ballot or (newest.checkpoint is None and not listed.joining):
            counting.add(worker)
    return counting


def reaches(holding: HoldingReport, version: int) -> bool:
    """Whether the copy, with the gradients it holds, gives exactly this version (rules 11, 15)."""
    return (
        holding.complete
        and holding.version <= version
        and all(step in holding.pending for step in range(holding.version, version))
    )


def member(worker: WorkerId, report: Report, counts: bool, version: int, nodes: Mapping[WorkerId, int]) -> Member:
    empty_handed = not counts or report.step < version - 1 or (report.bare and report.step != version - 1)
    return Member(worker, nodes[worker], joining=empty_handed, behind=empty_handed or report.step < version)


def certificate_before(version: int, counting: Sequence[Report]) -> Certificate:
    for report in counting:
        if report.step == version and report.previous is not None:
            return report.previous
        if report.step == version - 1 and report.certificate is not None:
            return report.certificate
    return Certificate(version - 1, ())


def start_plan(order: Order, reports: Mapping[WorkerId, Report]) -> Plan:
    """Start, or roll back to, the newest checkpoint: everyone takes everything from the store (rule 17)."""
    workers, version = order.staying(reports), order.checkpoint
    ranks = spread_by_speed(order.logical_ranks, workers, order.slowness)
    return Plan(
        ballot=order.ballot,
        members=tuple(Member(w, order.nodes[w], joining=True, behind=True) for w in workers),
        version=version,
        certificate=Certificate(version - 1, ()),
        checkpoint=version,
        shards=place_shards(workers, order.nodes, [set(workers)] * order.shards, None),
        ranks_now=ranks,
        ranks_next=ranks,
        stop_at=stop_at(order, version, 0 if order.parks(reports) else None),
        history=order.history,
    )


def assign_now(
    order: Order,
    newest: Plan,
    version: int,
    counting: Mapping[WorkerId, Report],
    attempts: tuple[Attempt, ...],
) -> tuple[WorkerId, ...]:
    """Logical ranks of step B: computed ones stay where they are, running ones go on, only the dead's are given out.
    Whoever leaves ends what it has begun, and is given nothing. Of a new attempt nothing is computed, and others do.
    """
    if len(attempts) > len(attempts_at(newest, version)):
        return other_workers(attempts, order.staying(order.nodes))
    at_version = {w: r for w, r in counting.items() if r.step == version and not r.bare}
    staying = order.staying(counting)
    if not at_version:
        return spread_by_speed(order.logical_ranks, order.staying(order.nodes), order.slowness)
    owner: dict[int, WorkerId] = {}
    for worker, report in at_version.items():
        if attempts_at(report.plan, version) != attempts:
            continue  # of an earlier attempt
        for low, high in report.computed:
            if not any(rank in owner for rank in range(low, high)):
                owner.update(dict.fromkeys(range(low, high), worker))
    owed = dict.fromkeys(counting, 0)
    before = newest.ranks_now if newest.version == version else newest.ranks_next
    takers = [w for w in staying if w in at_version] or sorted(at_version)
    for rank, worker in enumerate(before):
        begun = version not in order.held or worker in staying
        if rank not in owner and worker in counting and begun:
            owner[rank] = worker
            owed[worker] += 1
    for rank in range(order.logical_ranks):
        if rank not in owner:
            had = {attempt.workers[rank] for attempt in attempts}
            worker = min(takers, key=lambda w: (w in had, (owed[w] + 1) * order.slowness.get(w, 1.0), w))
            owner[rank] = worker
            owed[worker] += 1
    return tuple(owner[rank] for rank in range(order.logical_ranks))
