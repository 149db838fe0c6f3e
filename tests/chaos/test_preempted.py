"""Nodes are told to go while the job runs: they hand over first, and nothing is computed again."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

from tests.chaos.house import GLOBAL_BATCH, STEPS, House, Run

pytestmark = pytest.mark.timeout(600)
DEADLINE_SECONDS = 120.0  # generous: it is seen to by events, not by time
OWN = {"recipe": "counting:Counting", "cluster.preemption_seconds": DEADLINE_SECONDS}


def test_a_node_is_preempted_and_an_agent_gets_sigterm(house: House, reference: Run) -> None:
    """The first by an injected notice in mid-run; a node is added; then the other first one by a signal."""
    faults = [
        {"at_step": 5, "fault": f"preempt-node=1,seconds={DEADLINE_SECONDS:g}", "wait": False},
        {"at_step": 12, "fault": "add-node", "wait": True},
    ]
    house.trace.unlink(missing_ok=True)
    command, run = house.begin("preempted", faults=faults, **OWN, **{"model.vocab_size": house.vocab_size})
    run.wait_for("the new node joins", lambda: 2 in joined_nodes(run), command)
    agent = psutil.Process(run.pids(node=0)[0]).parent()
    assert agent is not None
    os.kill(agent.pid, signal.SIGTERM)
    run.wait_for("the agent ends", lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE, command)
    ended = command.wait()
    assert ended.code == 0, f"{ended.said()}\n{run.story()}"
    house.eye.nothing_left()
    house.same(reference, run)
    notices = [(e["node"], e["notice"]) for e in run.of_kind("preempted")]
    assert notices == [(1, "injected"), (0, "SIGTERM")], run.story()
    for departure in run.of_kind("departure"):
        check_departure(departure, run)
    assert sorted(w for e in run.of_kind("departure") for w in e["workers"]) == [0, 1, 2, 3]
    second = run.of_kind("departure")[1]
    assert second["bytes_moved"] > 0, run.story()  # the new node's workers are filled
    nothing_again(house, run)


def test_the_last_node_leaves_a_checkpoint_and_the_job_goes_on_when_one_comes(house: House, reference: Run) -> None:
    faults = [{"at_step": 8, "fault": f"preempt-node=0,seconds={DEADLINE_SECONDS:g}", "wait": False}]
    house.trace.unlink(missing_ok=True)
    one = {"cluster__nodes": 1, "cluster__workers_per_node": 1, "model.vocab_size": house.vocab_size}
    command, run = house.begin("parked", faults=faults, **OWN, **one)
    run.wait_for("it waits", lambda: bool(run.of_kind("departure")), command)
    run.wait_for("the status says so", lambda: run.status["state"] == "waiting" and not run.pids(), command)
    answer = house("inject", str(run.path), "add-node")
    assert answer.code == 0, answer.said()
    ended = command.wait()
    assert ended.code == 0, f"{ended.said()}\n{run.story()}"
    house.eye.nothing_left()
    house.same(reference, run)
    (departure,) = run.of_kind("departure")
    check_departure(departure, run)
    (waiting,) = run.of_kind("waiting")
    assert waiting["reason"].endswith(f"version {departure['checkpoint']}")
    assert 8 < departure["checkpoint"] < STEPS
    nothing_again(house, run)


def joined_nodes(run: Run) -> set[int]:
    return {e["node"] for e in run.of_kind("member_joined")} if run.directory.events.exists() else set()


def check_departure(departure: dict[str, Any], run: Run) -> None:
    assert departure["handed_over"], run.story()
    assert departure["seconds"] < departure["deadline_seconds"] <= DEADLINE_SECONDS
    assert departure["recomputed"] == 0


def nothing_again(house: House, run: Run) -> None:
    """By an independent count; and no departure was taken for a fault."""
    times = house.computed()
    assert len(times) == STEPS * GLOBAL_BATCH
    assert not {n for n, count in times.items() if count > 1 and n > 0}
    assert run.end["recomputed"] == 0
    assert run.end["computed"] == STEPS * GLOBAL_BATCH
    assert run.end["faults"] == 0
    assert not run.of_kind("recovery")
    assert not run.of_kind("fault_detected")
