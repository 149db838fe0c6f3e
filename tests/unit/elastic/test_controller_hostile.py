"""Unlucky moments: a controller that dies in mid-sentence, words that come twice, hosts that don't fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_controller_patience import Entry, Play, info
from test_controller_totals import record

from elastic import messages as m
from runtime.protocol import Plan


def successor(first: Play, *faults: Entry) -> Play:
    second = Play(*faults, durable=dict(first.of(m.Persist)[-1].state))
    second.say(m.CheckpointWritten(0))
    return second


def both_agents(play: Play) -> None:
    play.say(m.AgentUp(0, "a", "here", (info(0), info(1))), m.AgentUp(1, "b", "there", (info(2), info(3))))


def events(play: Play, kind: str) -> list[dict[str, Any]]:
    return [dict(event.fields) for event in play.of(m.AppendEvent) if event.kind == kind]


def go_on(play: Play, plan: Plan, time: float) -> None:
    play.say(*(m.PlanInstalled(worker, plan.ballot, True, 0, 0) for worker in plan.ids()))
    play.say(*(m.Resumed(worker, plan.ballot, time) for worker in plan.ids()))


@pytest.mark.parametrize(
    ("fault", "action"),
    [
        ("kill-worker=3", m.KillWorker(1, 3, fault=True)),
        ("kill-agent=1", m.KillAgent(1, again=True)),
        ("kill-node=1", m.KillAgent(1, again=False)),
    ],
)
def test_a_fault_that_was_recorded_and_not_done_is_done_by_the_next_controller(fault: str, action: m.Action) -> None:
    entry = Entry(0, fault)
    first = Play(entry).begun()
    first.say(*(m.WaitingAtGate(worker, 0) for worker in range(4)))
    assert action in first.actions
    second = successor(first, entry)
    both_agents(second)
    both_agents(second)
    assert second.actions.count(action) == 1 + (fault == "kill-node=1")  # whose slot is never used again
    assert not events(second, "fault_injected")


def test_a_worker_that_says_again_that_it_is_up_stays_ready() -> None:
    play = Play().begun()
    before = play.plan()
    play.say(m.WorkerUp(info(2)), m.WorkerExited(3, "SIGKILL", 1.0))
    assert play.controller.ballots.asking is not None
    play.report(0, 1, 2, plan=before)
    assert play.plan().ids() == (0, 1, 2)


def test_a_worker_that_an_agent_introduces_is_looked_at_like_any_other() -> None:
    play = Play().begun()
    play.say(m.AgentUp(2, "c", "elsewhere", (replace(info(9), probe="other bits"),)))
    assert play.of(m.KillWorker) == [m.KillWorker(2, 9)]
    assert "of another numerics class" in events(play, "member_left")[-1]["reason"]


def test_a_job_that_goes_on_is_not_ended_by_workers_that_cannot_start() -> None:
    play = Play().begun()
    play.say(m.AgentUp(2, "c", "bad host"))
    for _ in range(5):
        started = play.of(m.StartWorker)[-1].worker
        play.say(m.WorkerFailed(started, "no such module", True), m.WorkerExited(started, "exit code 3", 1.0))
        play.say(m.Tick(), after=61.0)
        assert play.of(m.StartWorker)[-1].worker == started + 1, "another is started after a while"
    assert not play.of(m.End)


def test_a_job_whose_only_workers_cannot_start_ends_with_the_reason() -> None:
    play = Play()
    play.say(m.AgentUp(0, "a", "here"), m.WorkerFailed(0, "no such module", True))
    assert [end.reason for end in play.of(m.End)] == ["no such module"]


def test_kills_of_workers_that_start_are_no_failed_starts() -> None:
    play = Play().begun()
    play.say(*(m.WorkerExited(worker, "SIGKILL", 1.0) for worker in range(4)))
    for _ in range(4):
        started = play.of(m.StartWorker)[-1].worker
        play.say(m.Killed(started, 1.0), m.WorkerExited(started, "SIGKILL", 1.0))
    assert not play.of(m.End)


def test_a_recovery_outlives_its_controller() -> None:
    first = Play().begun()
    before = first.plan()
    first.say(
        *(m.Progress(worker, 0, 1, 1) for worker in range(4)), m.Killed(3, 0.9), m.WorkerExited(3, "SIGKILL", 1.0)
    )
    first.report(0, 1, 2, plan=before)
    plan = first.plan()
    go_on(first, plan, 1.25)
    assert not events(first, "recovery")  # what was handed over is still being computed
    second = successor(first)
    second.say(m.AgentUp(0, "a", "here", (info(0), info(1))), m.AgentUp(1, "b", "there", (info(2),)))
    second.report(0, 1, 2, plan=plan)
    go_on(second, second.plan(), 9.0)
    (recovery,) = events(second, "recovery")
    assert (recovery["workers"], recovery["pause_ms"], recovery["recomputed"]) == ([3], 250.0, 1)
    assert abs(recovery["detect_ms"] - 100.0) < 1e-6


def test_members_that_went_with_their_node_while_no_controller_looked_are_told_of() -> None:
    first = Play().begun()
    first.say(*(m.Progress(worker, 0, 1, 1) for worker in range(4)), m.FaultRequested("stop"))
    second = successor(first)
    second.say(m.AgentUp(0, "a", "here", (replace(info(0), computed=1), replace(info(1), computed=1))))
    second.say(m.AgentDown(1, "", 5.0))
    assert [event["worker"] for event in events(second, "fault_detected")] == [2, 3]
    assert [event["worker"] for event in events(second, "member_left")] == [2, 3]
    status = second.controller.status()
    assert (status["faults"], status["micro_batches_computed"]) == (2, 4)


def test_a_second_loss_in_an_open_recovery_adds_its_own_pause() -> None:
    play = Play().begun()
    before = play.plan()
    play.say(m.WorkerExited(3, "SIGKILL", 1.0))
    play.report(0, 1, 2, plan=before)
    before = play.plan()
    go_on(play, before, 1.02)
    play.say(m.WorkerExited(2, "SIGKILL", 14.0))
    play.report(0, 1, plan=before)
    go_on(play, play.plan(), 14.03)
    play.say(m.StepsDecided(0, (record(0),)))
    (recovery,) = events(play, "recovery")
    assert (recovery["workers"], recovery["pause_ms"]) == ([2, 3], 50.0)
    assert len(events(play, "fault_detected")) == 2


def test_an_earlier_notice_that_comes_later_counts() -> None:
    play = Play().begun()
    before = play.plan()
    play.say(m.WorkerExited(3, "SIGKILL", 1.05), m.LinkLost(0, 3, 1.0))
    play.report(0, 1, 2, plan=before)
    go_on(play, play.plan(), 1.1)
    play.say(m.StepsDecided(0, (record(0),)))
    assert events(play, "recovery")[0]["pause_ms"] == pytest.approx(100.0)


def test_what_a_stop_throws_away_is_counted() -> None:
    play = Play().begun()
    before = play.plan()
    play.say(*(m.Progress(worker, 0, 1, 1) for worker in range(4)), m.StepsDecided(0, (record(0),)))
    play.say(*(m.Progress(worker, 1, 1, 2) for worker in range(3)), m.FaultRequested("stop"))
    asking = play.controller.ballots.asking
    assert asking is not None
    play.report(0, 1, 2, 3, plan=before)
    play.resume()
    play.say(m.StepsDecided(0, (record(0),)), m.CheckpointWritten(play.plan().stop_at), m.WeightsWritten(0, 1))
    (end,) = events(play, "run_ended")
    assert (end["computed"], end["recomputed"]) == (7, 3)


def test_workers_beyond_the_logical_ranks_are_said_to_stand_by() -> None:
    play = Play().begun()
    play.say(m.AgentUp(2, "c", "elsewhere"))
    (standby,) = events(play, "standby")
    assert standby == {"node": 2, "reason": "6 workers for 4 logical ranks, so 2 of them stand by"}


def test_a_request_waits_until_a_new_controller_knows_who_is_there() -> None:
    second = successor(Play().begun())
    second.say(m.FaultRequested("kill-worker=0"))
    assert not second.of(m.AppendEvent)[1:]
    both_agents(second)
    assert second.of(m.KillWorker) == [m.KillWorker(0, 0, fault=True)]


def test_a_job_that_what_it_runs_on_has_left_saves_what_it_can_and_fails() -> None:
    play = Play().begun()
    before = play.plan()
    play.say(m.CannotGoOn("Ray's gcs_server has died"))
    play.report(0, 1, 2, 3, plan=before)
    play.resume()
    play.say(m.WeightsWritten(0, 0))
    (end,) = play.of(m.End)
    assert (end.state, end.reason) == ("failed", "Ray's gcs_server has died; stopped at step 0; go on with --resume")


def test_after_a_restart_a_misfit_that_is_heard_first_does_not_cost_the_members() -> None:
    second = successor(Play().begun())
    second.say(m.AgentUp(0, "a", "here", (replace(info(9), probe="other bits"), info(0), info(1))))
    second.say(m.AgentUp(1, "b", "there", (info(2), info(3))))
    assert [kill.worker for kill in second.of(m.KillWorker)] == [9]
    assert not second.of(m.End)


def test_after_a_restart_a_joiner_that_fails_does_not_end_the_job() -> None:
    second = successor(Play().begun())
    second.say(m.WorkerFailed(9, "no such module", True))
    assert not second.of(m.End)


def test_an_agent_that_fails_ends_the_job() -> None:
    play = Play().begun()
    play.say(m.WorkerFailed(-1, "the agent of slot 1: it is broken", True))
    assert [end.reason for end in play.of(m.End)] == ["the agent of slot 1: it is broken"]


def test_a_stop_is_heard_before_the_agents_are() -> None:
    second = successor(Play().begun())
    second.say(m.FaultRequested("stop"))
    assert events(second, "fault_injected") == [{"fault": "stop"}]
