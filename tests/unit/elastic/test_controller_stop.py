"""`stop` ends a job that can't go on, too."""

from __future__ import annotations

from dataclasses import replace

from test_controller_patience import Play
from test_controller_totals import record

from elastic import messages as m


def test_stop_does_not_wait_for_workers_that_only_training_needs() -> None:
    play = Play()
    play.controller.facts = replace(play.controller.facts, min_workers=4)
    before = play.begun().plan()
    play.say(m.AgentDown(1, "b", 1.0))
    assert play.controller.status()["state"] == "waiting"
    play.say(m.FaultRequested("stop"))
    assert play.controller.status()["state"] != "waiting"
    play.report(0, 1, plan=before)
    assert (play.plan().ids(), play.plan().stop_at) == ((0, 1), 0)


def test_stop_with_nobody_left_ends_at_the_checkpoint() -> None:
    play = Play().begun()
    play.say(m.CheckpointWritten(4))
    play.say(m.AgentDown(0, "a", 1.0), m.AgentDown(1, "b", 1.0))
    assert not play.of(m.End)
    play.say(m.FaultRequested("stop"))
    assert play.of(m.End) == [m.End("stopped", "no worker lives; go on from step 4 with --resume")]


def test_stop_at_the_start_waits_for_nothing() -> None:
    play = Play()
    play.say(m.AgentUp(0, "a", "here"), m.FaultRequested("stop"))
    assert play.of(m.End) == [m.End("stopped", "stopped before it had begun")]


def test_agents_that_end_again_and_again_end_the_job() -> None:
    play = Play()
    for life in range(100):
        play.say(m.AgentUp(0, f"a{life}", "here"))
        if play.of(m.End):
            break
    assert life == 12
    assert play.of(m.End)[0].reason == "the agent of slot 0 ends again and again; see logs/agent-0.log"


def test_nodes_that_come_and_go_do_not() -> None:
    play = Play()
    for slot in range(60):
        play.say(m.AgentUp(slot, f"a{slot}", "here"), m.AgentDown(slot, f"a{slot}", 1.0))
    assert not play.of(m.End)


def test_a_job_whose_workers_die_again_and_again_at_one_step_fails() -> None:
    play = Play().begun()
    last = -1
    while not play.of(m.End) and last < 40:
        last += 1
        play.up(last)
        play.say(m.WorkerExited(last, "exit code 9", 1.0))
    assert play.of(m.End) == [m.End("failed", "16 workers died in step 0, the last of them, worker 15, by exit code 9")]


def test_a_job_that_gets_on_between_deaths_goes_on() -> None:
    play = Play().begun()
    for worker in range(40):
        play.up(worker)
        play.say(m.WorkerExited(worker, "SIGKILL", 1.0))
        if worker % 10 == 0:
            step = play.controller.chronicle.ledger_next
            play.say(m.StepsDecided(worker, (record(step),)))
    assert not play.of(m.End)
