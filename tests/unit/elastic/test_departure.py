"""A node that is told to go: what the planner makes of it, and what the controller does until it is gone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from elastic import messages as m
from elastic.placement import place_shards
from elastic.plan import Order, make_plan
from runtime.protocol import Ballot, Certificate, HoldingReport, Plan, Report, ShardPlan, WorkerId
from tests.unit.elastic.test_controller_patience import Entry, Play

NODES = {0: 0, 1: 0, 2: 1, 3: 1}


# --- the planner ------------------------------------------------------------------------------------------------


def test_a_copy_that_only_leavers_hold_stays_with_them_until_two_are_filled() -> None:
    before = [ShardPlan(2, (3,))]
    (placed,) = place_shards([0, 1], NODES, [{2, 3}], before, {2, 3})
    assert placed.owner == 2
    assert placed.fill
    assert set(placed.fill) == {0, 1}
    assert set(placed.backups) == {0, 1, 3}


def test_a_copy_of_one_who_stays_owns_the_shard_and_the_leavers_backs_it_meanwhile() -> None:
    (placed,) = place_shards([0, 1], NODES, [{0, 2}], [ShardPlan(2, (0,))], {2, 3})
    assert (placed.owner, placed.fill) == (0, (1,))
    assert set(placed.backups) == {1, 2}


def test_leavers_hold_nothing_where_two_copies_stay() -> None:
    (placed,) = place_shards([0, 1], NODES, [{0, 1, 2}], [ShardPlan(2, (0,))], {2, 3})
    assert {placed.owner, *placed.backups} == {0, 1}
    assert placed.fill == ()


def test_one_who_stays_alone_takes_all_and_a_leaver_backs_it() -> None:
    placed = place_shards([0], NODES, [{0, 2}, {2}], [ShardPlan(2, (0,)), ShardPlan(2, ())], {2})
    assert placed == (ShardPlan(0, (2,)), ShardPlan(2, (0,), (0,)))


def test_leavers_end_the_step_they_are_in_and_get_no_other() -> None:
    plan = make_plan(order(leaving={2, 3}), reports(PLAN, computed={2: (2, 3)}))
    assert set(plan.ids()) == {0, 1, 2, 3}
    assert plan.ranks_now == (0, 1, 2, 3)
    assert set(plan.ranks_next) == {0, 1}


def test_at_a_boundary_that_is_held_nothing_has_begun_so_leavers_get_nothing() -> None:
    plan = make_plan(order(leaving={2, 3}, held={PLAN.version}), reports(PLAN))
    assert set(plan.ranks_now) == {0, 1}


def test_leavers_are_left_out_once_others_have_all_and_they_owe_no_work() -> None:
    spared = replace(PLAN, ranks_next=(0, 0, 1, 1), shards=(ShardPlan(0, (1,)), ShardPlan(1, (0,))))
    plan = make_plan(order(leaving={2, 3}), reports(spared, step=spared.version + 1))
    assert set(plan.ids()) == {0, 1}
    unfilled = replace(spared, shards=PLAN.shards)
    held = make_plan(order(leaving={2, 3}), reports(unfilled, step=spared.version + 1))
    assert set(held.ids()) == {0, 1, 2, 3}
    owing = make_plan(order(leaving={2, 3}), reports(spared))  # still in the step whose ranks they have
    assert set(owing.ids()) == {0, 1, 2, 3}


def test_where_too_few_stay_the_plan_ends_with_the_step_that_has_begun() -> None:
    everyone = {0, 1, 2, 3}
    plan = make_plan(order(leaving=everyone), reports(PLAN))
    assert (plan.stop_at, set(plan.ids()), set(plan.ranks_now)) == (PLAN.version + 1, everyone, everyone)
    assert make_plan(order(leaving=everyone, held={PLAN.version}), reports(PLAN)).stop_at == PLAN.version
    assert make_plan(replace(order(leaving={2, 3}), min_workers=3), reports(PLAN)).stop_at == PLAN.version + 1


def test_a_rollback_is_for_those_who_stay() -> None:
    lost = {w: replace(r, holdings=()) for w, r in reports(PLAN).items()}
    plan = make_plan(order(leaving={2, 3}), lost)
    assert (plan.checkpoint, set(plan.ids()), plan.stop_at) == (0, {0, 1}, 10)


PLAN = Plan(
    ballot=Ballot(1, 1),
    members=(),
    version=3,
    certificate=Certificate(2, ()),
    checkpoint=None,
    shards=(ShardPlan(0, (2,)), ShardPlan(2, (3,))),
    ranks_now=(0, 1, 2, 3),
    ranks_next=(0, 1, 2, 3),
    stop_at=10,
)


def order(leaving: set[WorkerId], held: set[int] = frozenset()) -> Order:  # type: ignore[assignment]
    return Order(Ballot(1, 2), NODES, 4, 2, 10, 0, leaving=frozenset(leaving), held=frozenset(held))


def reports(
    plan: Plan, step: int | None = None, computed: dict[int, tuple[int, int]] | None = None
) -> dict[int, Report]:
    from runtime.protocol import Member

    at = plan.version if step is None else step
    plan = replace(plan, members=tuple(Member(w, NODES[w]) for w in sorted(NODES)))
    out = {}
    for worker in NODES:
        held = [s for s, where in enumerate(plan.shards) if worker in (where.owner, *where.backups)]
        holdings = tuple(HoldingReport(s, True, at, ()) for s in held)
        done = (computed or {}).get(worker)
        nodes = (done,) if done is not None else ()
        before = Certificate(at - 1, ())
        out[worker] = Report(Ballot(1, 2), worker, plan, at, False, None, before, holdings, nodes)
    return out


# --- the controller ---------------------------------------------------------------------------------------------


def notice(slot: int, instance: str) -> m.Preempted:
    return m.Preempted(slot, instance, 30.0, "SIGTERM")


def events(play: Play, kind: str) -> list[dict[str, Any]]:
    return [dict(a.fields) for a in play.of(m.AppendEvent) if a.kind == kind]


def replan(play: Play) -> Plan:
    asking = play.controller.ballots.asking
    assert asking is not None
    play.report(*sorted(asking.asked), plan=play.plan())
    return play.plan()


def test_a_notice_is_told_of_once_and_its_slot_is_given_up() -> None:
    play = Play().begun()
    play.say(notice(1, "b"), notice(1, "b"))
    assert events(play, "preempted") == [{"node": 1, "seconds": 30.0, "notice": "SIGTERM"}]
    assert play.controller.roster.slots == {0}
    assert play.controller.status()["leaving"] == [1]
    plan = replan(play)
    assert set(plan.ids()) == {0, 1, 2, 3}
    assert set(plan.ranks_next) == {0, 1}
    assert not play.of(m.ReleaseAgent)


def test_a_late_notice_of_an_earlier_life_of_the_agent_says_nothing() -> None:
    play = Play().begun()
    play.say(notice(1, "earlier"))
    assert not events(play, "preempted")


def test_a_node_without_members_goes_at_once_and_nobody_is_started_for_it() -> None:
    play = Play()
    play.say(m.AgentUp(0, "a", "here"), m.AgentUp(1, "b", "there"))
    started = len(play.of(m.StartWorker))
    play.say(notice(1, "b"))
    assert [a.slot for a in play.of(m.ReleaseAgent)] == [1]
    play.say(m.AgentDown(1, "b", 0.0))
    assert events(play, "departure")[0]["handed_over"]
    assert len(play.of(m.StartWorker)) == started
    play.up(0, 1)
    play.say(m.CheckpointWritten(0))
    play.say(m.Tick(), after=1.0)
    assert play.controller.ballots.asking is not None  # the job begins with those who are there
    assert play.controller.ballots.asking.asked == {0, 1}


def test_a_node_that_dies_before_it_has_handed_over_is_a_loss_like_any_other() -> None:
    play = Play().begun()
    play.say(notice(1, "b"))
    replan(play)
    play.say(m.AgentDown(1, "b", 0.0))
    assert [e["worker"] for e in events(play, "fault_detected")] == [2, 3]
    (departure,) = events(play, "departure")
    assert not departure["handed_over"]
    assert [(a.slot, a.again) for a in play.of(m.KillAgent)] == [(1, False)]  # Ray would bring it back


@pytest.mark.parametrize("told_again", [True, False])
def test_a_new_controller_knows_of_it(told_again: bool) -> None:
    play = Play().begun()
    play.say(notice(1, "b"))
    durable = json.loads(json.dumps(play.of(m.Persist)[-1].state))
    second = Play(durable=durable)
    infos = [tuple(i.info for i in play.controller.roster if i.node == node and i.info) for node in (0, 1)]
    second.say(m.AgentUp(0, "a", "here", infos[0]), m.AgentUp(1, "b", "there", infos[1]))
    if told_again:
        second.say(notice(1, "b"))
    assert second.controller.roster.leaves(2)
    assert not events(second, "preempted")
    assert not second.of(m.KillAgent)
    assert not second.of(m.ReleaseAgent)  # its workers are members


def test_an_injected_notice_goes_to_the_agent_and_again_by_the_next_controller() -> None:
    entry = Entry(0, "preempt-node=1,seconds=7", wait=False)
    play = Play(entry).begun()
    assert [(a.slot, a.seconds) for a in play.of(m.PreemptAgent)] == [(1, 7.0)]
    durable = json.loads(json.dumps(play.of(m.Persist)[-1].state))
    second = Play(entry, durable=durable)
    second.say(m.AgentUp(0, "a", "here"), m.AgentUp(1, "b", "there"))
    assert [(a.slot, a.seconds) for a in second.of(m.PreemptAgent)] == [(1, 7.0)]
