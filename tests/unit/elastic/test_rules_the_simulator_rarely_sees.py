"""Rules whose breach needs so rare a course of events that a thousand seeds may miss it, held directly.

Each goes with a planted bug of tests/sim/bugs.py.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.ballots import Ballots
from elastic.plan import Order, make_plan, reaches, who_counts
from runtime.protocol import NO_BALLOT, Ballot, Certificate, HoldingReport, Member, Plan, Report, ShardPlan

VOID = Certificate(4, ())


def plan(number: int, *members: Member, checkpoint: int | None = None) -> Plan:
    ids = tuple(m.worker for m in members)
    shards = (ShardPlan(ids[0], ids[1:2]),)
    return Plan(Ballot(1, number), members, 5, VOID, checkpoint, shards, (ids[0],), (ids[0],), 20)


def report(worker: int, installed: Plan | None, *holdings: HoldingReport, step: int = 5) -> Report:
    return Report(Ballot(1, 9), worker, installed, step, False, None, VOID, holdings, ())


def test_numbers_of_two_controllers_never_meet() -> None:
    """Rule 9: the incarnation tells them apart, and the newer one's first number is above all of the older one's."""
    older, newer = Ballots(1), Ballots(2)
    given = [older.open({0}, "", 0.0).ballot for _ in range(50)]
    first = newer.open({0}, "", 0.0).ballot
    assert first not in given
    assert all(NO_BALLOT < ballot < first for ballot in given)


def test_a_joiner_that_has_not_installed_the_newest_plan_does_not_count() -> None:
    """Rule 12: what it held before is another lineage's."""
    old = plan(1, Member(0, 0), Member(1, 1), Member(2, 0))
    newest = plan(2, Member(0, 0), Member(1, 1), Member(2, 0, joining=True, behind=True))
    reports = {0: report(0, newest), 1: report(1, old), 2: report(2, old)}
    assert who_counts(newest, reports) == {0, 1}
    assert who_counts(newest, {**reports, 2: report(2, newest)}) == {0, 1, 2}
    assert who_counts(replace(newest, checkpoint=5), reports) == {0}


def test_a_copy_that_lacks_a_gradient_is_not_complete() -> None:
    """Rule 15: by its version and by what it holds, not by its snapshot."""
    assert reaches(HoldingReport(0, True, 3, (3, 4)), 5)
    assert not reaches(HoldingReport(0, True, 3, (4,)), 5)
    assert not reaches(HoldingReport(0, True, 6, ()), 5)
    assert not reaches(HoldingReport(0, False, 5, ()), 5)


def test_a_shard_without_a_copy_that_counts_goes_back_to_the_checkpoint() -> None:
    """Rules 12 and 17 together: the joiner's old copy of the shard is none."""
    old = plan(1, Member(0, 0), Member(1, 1))
    newest = plan(2, Member(0, 0), Member(1, 1, joining=True, behind=True))
    copy = HoldingReport(0, True, 5, ())
    order = Order(Ballot(1, 9), {0: 0, 1: 1}, 1, 1, 20, checkpoint=2)
    assert make_plan(order, {0: report(0, newest), 1: report(1, old, copy)}).checkpoint == 2
    assert make_plan(order, {0: report(0, newest, copy), 1: report(1, old)}).checkpoint is None
