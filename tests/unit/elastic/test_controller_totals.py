"""What a run has cost is counted on by the next controller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from test_controller_patience import Entry, Play, info

from elastic import messages as m
from elastic.controller import resumed_state
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
