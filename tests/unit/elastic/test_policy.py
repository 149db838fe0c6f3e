"""What is done about a loss, and how it is told; also the loss of an agent that says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from elastic import messages as m
from elastic.controller import Controller
from elastic.controller_state import ControllerFacts
from elastic.policy import Policy, Tier
from tests.unit.elastic.test_controller_patience import Play


def play(policy: Policy, standbys: int = 1) -> Play:
    begun = Play(standbys=standbys)
    facts = ControllerFacts(2, 2, standbys, 1, 4, 2, 10, 1, (), policy)
    begun.controller = Controller(facts, None, 1, 0, lambda step: None, None)
    begun.actions = begun.controller.start(begun.now)
    return begun.begun()


def plans(play: Play) -> list[dict[str, Any]]:
    return [dict(action.fields) for action in play.of(m.AppendEvent) if action.kind == "plan"]


def lose(play: Play, worker: int, before: Any) -> None:
    play.say(m.WorkerExited(worker, "SIGKILL", 0.0))
    asking = play.controller.ballots.asking
    assert asking is not None
    play.report(*sorted(asking.asked), plan=before)


def test_a_standby_takes_the_place_in_the_same_change() -> None:
    job = play(Policy())
    assert [plan["tier"] for plan in plans(job)] == [Tier.START]
    lose(job, 3, job.plan())
    assert plans(job)[-1]["tier"] == Tier.STANDBY
    assert plans(job)[-1]["members"] == [0, 1, 2, 4]


def test_or_the_rest_go_on_at_once_and_it_joins_later() -> None:
    job = play(Policy(worker_lost="redistribute"))
    lose(job, 3, job.plan())
    assert plans(job)[-1]["tier"] == Tier.REDISTRIBUTE
    assert plans(job)[-1]["members"] == [0, 1, 2]
    before = job.plan()
    job.resume()
    job.say(m.Tick(), after=1.0)
    job.report(0, 1, 2, 4, plan=before)
    assert plans(job)[-1]["tier"] == Tier.REJOIN
    assert plans(job)[-1]["members"] == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("policy", "event", "says"),
    [
        (Policy(worker_lost="stop"), m.WorkerExited(3, "SIGKILL", 0.0), "policy.worker_lost is stop"),
        (Policy(node_lost="stop"), m.AgentDown(1, "b", 0.0), "policy.node_lost is stop"),
    ],
)
def test_or_the_job_stops_with_a_checkpoint(policy: Policy, event: m.Event, says: str) -> None:
    job = play(policy, standbys=0)
    before = job.plan()
    job.say(event)
    asking = job.controller.ballots.asking
    assert asking is not None
    job.report(*sorted(asking.asked), plan=before)
    assert job.plan().stop_at < 10
    assert says in job.controller.stop_reason


def test_a_new_controller_knows_why_the_job_stops() -> None:
    job = play(Policy(worker_lost="stop"), standbys=0)
    before = job.plan()
    job.say(m.WorkerExited(3, "SIGKILL", 0.0))
    job.report(0, 1, 2, plan=before)
    new = Controller(job.controller.facts, job.of(m.Persist)[-1].state, 2, 0, lambda step: None, 0)
    assert "policy.worker_lost is stop" in new.stop_reason


def test_the_other_kind_of_loss_does_not_stop_it() -> None:
    job = play(Policy(node_lost="stop"))
    lose(job, 3, job.plan())
    assert job.plan().stop_at == 10


@pytest.mark.parametrize("holders_lost", ["checkpoint", "stop"])
def test_when_every_holder_is_lost(holders_lost: str) -> None:
    job = play(Policy(holders_lost=holders_lost), standbys=0)
    before = job.plan()
    job.say(*(m.WorkerExited(worker, "SIGKILL", 0.0) for worker in (1, 2, 3)))
    job.report(0, plan=before)
    ends = job.of(m.End)
    if holders_lost == "stop":
        assert "every holder of a shard was lost" in ends[-1].reason
    else:
        assert not ends
        assert plans(job)[-1]["tier"] == Tier.CHECKPOINT


def test_an_agent_that_says_nothing_is_given_up() -> None:
    job = play(Policy(), standbys=0)
    for _ in range(10):
        job.say(m.AgentBeat(0, "a", 0.0), m.AgentBeat(1, "b", 0.0), m.Tick(), after=0.4)
    for _ in range(10):
        job.say(m.AgentBeat(0, "a", 0.0), m.Tick(), after=0.4)
    assert job.of(m.KillAgent) == [m.KillAgent(1, again=True)]
    left = [action.fields for action in job.of(m.AppendEvent) if action.kind == "member_left"]
    assert [fields["worker"] for fields in left] == [2, 3]
    assert all("node 1 has been silent" in fields["reason"] for fields in left)
    job.say(m.AgentBeat(1, "b", 0.0))  # it was only stopped, or out of reach
    assert job.of(m.KillAgent) == [m.KillAgent(1, again=True)] * 2
    job.say(m.AgentUp(1, "c", "there"))
    assert [action.slot for action in job.of(m.StartWorker)][-1] == 1


def test_nobody_is_given_up_by_a_controller_that_was_stopped() -> None:
    job = play(Policy(), standbys=0)
    job.say(m.AgentBeat(0, "a", 0.0), m.AgentBeat(1, "b", 0.0))
    job.say(m.Tick(), after=100.0)
    assert not job.of(m.KillAgent)
