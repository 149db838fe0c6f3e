"""What is stopped and not dead, so no socket closes and it has to be found; and faults at points of the protocol."""

from __future__ import annotations

import pytest

from tests.chaos.house import House, Run

pytestmark = pytest.mark.timeout(600)


def fault(at_step: int, what: str, wait: bool = True) -> dict[str, object]:
    return {"at_step": at_step, "fault": what, "wait": wait}


def test_a_frozen_worker_agent_and_controller(house: House, reference: Run) -> None:
    faults = [
        fault(3, "freeze-worker=1"),
        fault(6, "freeze-worker=0,seconds=0.05", wait=False),  # not long enough to be found
        fault(9, "freeze-agent=1"),
        fault(14, "freeze-controller"),
    ]
    run = house.train("frozen", faults=faults)
    house.same(reference, run)
    left = {event["worker"]: event["reason"] for event in run.of_kind("member_left")}
    assert left.pop(1).startswith("stopped, and silent for ")
    assert len(left) == 2, left
    assert all(reason == "the agent of node 1 has been silent for 3 s" for reason in left.values())
    first, second = run.of_kind("recovery")
    assert first["workers"] == [1]
    assert first["detect_ms"] is not None
    assert second["workers"] == sorted(left)
    assert run.status["incarnation"] == 2


def test_at_points_of_the_protocol(house: House, reference: Run) -> None:
    """Each dies where it would hurt most."""
    faults = [
        fault(2, "kill-worker=3,during=reduce", wait=False),
        fault(5, "freeze-worker=2,during=vote", wait=False),
        fault(8, "kill-controller,during=plan", wait=False),
        fault(8, "kill-agent=0,during=publish", wait=False),
        fault(13, "kill-controller"),
    ]
    run = house.train("points", faults=faults, cluster__standbys=1)
    house.same(reference, run)
    assert [event["fault"] for event in run.of_kind("fault_injected")] == [entry["fault"] for entry in faults]
    assert not run.of_kind("fault_skipped")
    left = {event["worker"]: event["reason"] for event in run.of_kind("member_left")}
    assert left[3] == "SIGKILL"
    assert left[2].startswith("stopped, and silent for ")
