"""Ways to end a job or to leave it alone: Ctrl-C, a second one, a closed terminal, --detach, a kill from outside."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.chaos.house import STEPS, House, Run

pytestmark = pytest.mark.timeout(600)


def test_ctrl_c_and_resume_with_another_number_of_workers(house: House, reference: Run) -> None:
    command, run = house.begin("stopped", checkpoint__full_every=0)
    run.wait_for_steps(4, command)
    command.send(signal.SIGINT)
    ended = command.wait()
    assert ended.code == 130, f"{ended.said()}\n{run.story()}"
    assert "stopped: go on with `everstep run job.yaml --set " in ended.out
    assert ended.err == ""
    house.eye.nothing_left()
    assert run.end["state"] == "stopped"
    at = len(run.records)
    assert 4 <= at < STEPS
    assert run.of_kind("checkpoint")[-1]["version"] == at
    before = run.directory.ledger.read_bytes()

    other = house(*house.run_arguments("stopped", resume=True, optimizer__lr=1e-3))
    assert other.code == 2
    assert "optimizer.lr: was 0.002 when this run began and is 0.001 now" in other.err
    assert run.directory.ledger.read_bytes() == before

    # Three workers on one node, and numbers of workers and nodes that go on where they were.
    other_cluster = {"cluster__nodes": 1, "cluster__workers_per_node": 3}
    ended = house(*house.run_arguments("stopped", resume=True, **other_cluster))
    assert ended.code == 0, f"{ended.said()}\n{run.story()}"
    house.eye.nothing_left()
    assert run.directory.ledger.read_bytes().startswith(before)
    joined = run.of_kind("member_joined")
    assert [e["worker"] for e in joined] == [0, 1, 2, 3, 4, 5, 6]
    assert {e["node"] for e in joined[4:]} == {2}
    assert run.end["computed"] == (STEPS - at) * 16
    house.same(reference, run)
    assert house("audit", "runs/stopped").code == 0


def test_a_job_goes_on_without_its_terminal(house: House, reference: Run) -> None:
    """SIGHUP detaches; others attach, ask for its status, and inject faults."""
    command, run = house.begin("alone", train__pad_micro_batch_seconds=0.25)
    run.wait_for_steps(2, command)
    command.send(signal.SIGHUP)
    assert command.wait(60).code == 0
    status = house("status", "runs/alone", "--json")
    assert status.code == 0
    check_status(json.loads(status.out))
    viewer = house.start("attach", "runs/alone")
    run.wait_for("a viewer", lambda: "attached at step" in viewer.out, viewer)
    answer = house("inject", "runs/alone", "kill-worker=2", "kill-worker=17")
    assert answer.out == "kill-worker=2: injected\nkill-worker=17: skipped, worker 17 is not there\n", answer.said()
    ended = viewer.wait()
    assert ended.code == 0, f"{ended.said()}\n{run.story()}"
    assert "done: runs/alone" in ended.out
    assert f"step {STEPS - 1} of {STEPS}" in ended.out
    house.eye.nothing_left()
    assert [e["workers"] for e in run.of_kind("recovery")] == [[2]]
    house.same(reference, run)


def test_two_hard_ends(house: House, reference: Run) -> None:
    """The job process is killed; resumed, it is ended by a second Ctrl-C. Neither leaves anything, and it goes on."""
    ended = house(*house.run_arguments("hard", checkpoint__full_every=3), "--detach")
    assert ended.code == 0, ended.said()
    run = house.at("hard")
    run.wait_for_steps(5)
    os.kill(run.job_pid(), signal.SIGKILL)
    house.eye.nothing_left(seconds=20, files=False)  # which the next job sweeps away
    assert "the job process died without ending the run" in house("status", "runs/hard").out
    steps = len(run.records)

    slowly = {"train__pad_micro_batch_seconds": 0.5}  # so that it can't stop by itself soon
    command = house.start(*house.run_arguments("hard", resume=True, checkpoint__full_every=3, **slowly))
    run.wait_for_steps(steps + 2, command)
    assert run.of_kind("plan")[-1]["step"] in (3, steps // 3 * 3)  # from a checkpoint, over steps that are recorded
    command.send(signal.SIGINT)
    run.wait_for("the first Ctrl-C is taken in", lambda: "Ctrl-C again ends at once" in command.out, command)
    command.send(signal.SIGINT)
    ended = command.wait(60)
    assert ended.code == 130, f"{ended.said()}\n{run.story()}"
    assert ended.err == ""
    house.eye.nothing_left()
    assert run.end["state"] == "stopped"
    assert len(run.records) < STEPS

    ended = house(*house.run_arguments("hard", resume=True, checkpoint__full_every=3))
    assert ended.code == 0, f"{ended.said()}\n{run.story()}"
    house.eye.nothing_left()
    house.same(reference, run)


def check_status(status: dict[str, object]) -> None:
    assert set(status) == {"state", "step", "steps", "generation", "members"}
    assert (status["state"], status["steps"], status["generation"]) == ("training", STEPS, 1)
    members = status["members"]
    assert isinstance(members, list)
    assert [m["id"] for m in members] == [0, 1, 2, 3]
    assert [m["node"] for m in members] == [0, 0, 1, 1]
    assert {m["role"] for m in members} == {"member"}
    assert [m["logical_ranks"] for m in members] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(m["pid"] > 1 and m["optimizer_bytes"] > 0 for m in members)
