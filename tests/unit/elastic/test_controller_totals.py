"""What a run has cost is counted on by the next controller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from test_controller_patience import Entry, Play, info

from elastic import messages as m
from elastic.controller_state import resumed_state
from runtime.protocol import StepRecord


def record(step: int) -> StepRecord:
    return StepRecord(step, 1, 4, 2, (step, step + 1), 1, 0.0, 0.0, 0.0, "commit", "d", "d")


def disturbed() -> Play:
    """Four workers have computed one micro-batch each of step 0; worker 3 is killed, and its own is lost."""
    play = Play().begun()
    play.say(*(m.Progress(worker, 0, 1, 1, 100 + worker) for worker in range(4)))
    before = play.plan()
    play.say(m.WorkerExited(3, "SIGKILL", 1.0))
    play.report(0, 1, 2, plan=before)
    play.resume()
    play.say(m.Progress(0, 0, 2, 2, 100))
    return play


def test_progress_says_how_much_was_computed_and_what_is_held() -> None:
    status = disturbed().controller.status()
    assert (status["micro_batches_computed"], status["micro_batches_recomputed"], status["faults"]) == (5, 1, 1)
    assert status["members"][0]["optimizer_bytes"] == 100


def test_a_new_controller_counts_on() -> None:
    state: dict[str, Any] = disturbed().of(m.Persist)[-1].state
    second = Play(durable=state)
    assert second.controller.status()["micro_batches_computed"] == 1  # by the dead
    second.say(m.AgentUp(0, "a", "here", (replace(info(0), computed=2), replace(info(1), computed=1))))
    second.say(m.AgentUp(0, "a", "here", (replace(info(0), computed=2), replace(info(1), computed=1))))  # says it again
    second.say(m.AgentUp(1, "b", "there", (info(2),)))
    second.say(m.Progress(0, 0, 2, 2), m.Progress(2, 0, 1, 1))
    status = second.controller.status()
    assert (status["micro_batches_computed"], status["micro_batches_recomputed"], status["faults"]) == (5, 1, 1)


def test_a_resumed_job_counts_its_own() -> None:
    state = resumed_state(disturbed().of(m.Persist)[-1].state, same_faults=True)
    status = Play(durable=state).controller.status()
    assert (status["micro_batches_computed"], status["micro_batches_recomputed"], status["faults"]) == (0, 0, 0)


def test_a_fault_is_not_recorded_before_the_steps_before_it() -> None:
    play = Play(Entry(1, "kill-worker=1")).begun()
    play.say(m.WaitingAtGate(2, 1))  # worker 2 stands at the boundary; word of step 0 is under way
    assert not play.of(m.KillWorker)
    play.say(m.StepsDecided(0, (record(0),)))
    assert [kill.worker for kill in play.of(m.KillWorker)] == [1]


def test_a_member_that_died_while_no_controller_looked_is_a_fault_like_any_other() -> None:
    first = Play().begun()
    first.say(*(m.Progress(worker, 0, 1, 1) for worker in range(4)))
    before = first.plan()
    second = Play(durable=dict(first.of(m.Persist)[-1].state))
    second.say(m.CheckpointWritten(0), m.AgentUp(0, "a", "here", (info(0), info(1))))
    unseen = m.AgentUp(1, "b", "there", (info(2),), (4,), (m.Exit(3, "SIGKILL", 5.0, 1), m.Exit(9, "old", 1.0, 7)))
    second.say(unseen, unseen)
    second.say(*(m.Progress(worker, 0, 1, 1) for worker in range(3)), m.Killed(3, 4.5))
    assert second.controller.status()["micro_batches_computed"] == 4
    second.report(0, 1, 2, plan=before)
    plan = second.plan()
    assert plan.ids() == (0, 1, 2)
    second.say(*(m.PlanInstalled(worker, plan.ballot, True, 0, 1) for worker in plan.ids()))
    second.say(*(m.Resumed(worker, plan.ballot, 6.0) for worker in plan.ids()))
    second.say(m.StepsDecided(0, (record(0),)))
    events = [(event.kind, event.fields) for event in second.of(m.AppendEvent)][1:]
    assert [kind for kind, _ in events] == ["fault_detected", "member_left", "plan", "recovery"]
    left, recovery = events[1][1], events[3][1]
    assert (left["worker"], left["reason"]) == (3, "SIGKILL")
    assert recovery["workers"] == [3]
    assert (recovery["detect_ms"], recovery["pause_ms"]) == (500.0, 1000.0)
    assert (recovery["links_opened"], recovery["links_closed"]) == (0, 3)


def test_what_a_later_change_costs_is_not_the_recoverys() -> None:
    """The survivors went on long ago; what was handed to them waits at a boundary that a fault holds."""
    play = Play().begun()
    before = play.plan()
    play.say(m.WorkerExited(3, "SIGKILL", 1.0))
    play.report(0, 1, 2, plan=before)
    recovery_plan = play.plan()
    play.say(*(m.PlanInstalled(worker, recovery_plan.ballot, True, 0, 1) for worker in recovery_plan.ids()))
    play.say(*(m.Resumed(worker, recovery_plan.ballot, 2.0) for worker in recovery_plan.ids()))
    play.up(4)
    play.say(m.Tick(), after=1.0)
    play.report(0, 1, 2, plan=recovery_plan)
    play.report(4)
    join = play.plan()
    assert join.ids() == (0, 1, 2, 4)
    play.say(*(m.PlanInstalled(worker, join.ballot, True, 1, 0) for worker in join.ids()))
    play.say(*(m.Resumed(worker, join.ballot, 9.0, 10**6) for worker in join.ids()))
    play.say(*(m.Recomputed(worker, join.ballot, 7.0) for worker in join.ids()))
    play.say(m.StepsDecided(0, (record(0),)))
    (recovery,) = [event.fields for event in play.of(m.AppendEvent) if event.kind == "recovery"]
    assert (recovery["pause_ms"], recovery["bytes_moved"]) == (1000.0, 0)
    assert (recovery["links_opened"], recovery["links_closed"]) == (0, 3)
    assert recovery["recompute_ms"] == 7.0


def test_a_rollback_after_all_have_died_counts_the_steps_that_come_again() -> None:
    play = Play().begun()
    play.say(m.StepsDecided(0, (record(0), record(1))))
    play.say(*(m.Progress(worker, step, 1, step + 1) for step in range(3) for worker in range(4)))
    play.say(*(m.WorkerExited(worker, "SIGKILL", 1.0) for worker in range(4)))
    play.up(4, 5, 6, 7)
    play.say(m.Tick(), after=1.0)
    play.report(4, 5, 6, 7)
    assert play.plan().checkpoint == 0
    assert play.controller.status()["micro_batches_recomputed"] == 3 * 4
