"""A node's wall clock is set wrong in mid-run: nobody is taken for lost, and what a death costs is told rightly."""

from __future__ import annotations

import pytest

from tests.chaos.house import House, Run

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_wrong_clock_changes_nothing_but_stamps(house: House, reference: Run, seconds: int) -> None:
    faults = [
        {"at_step": 2, "fault": f"clock-jump=1,seconds={seconds}", "wait": False},
        {"at_step": 20, "fault": "kill-worker=3,during=vote", "wait": False},
    ]
    run = house.train(f"clock-{seconds}", faults=faults, train__pad_micro_batch_seconds=0.1)
    house.same(reference, run)
    assert [event["worker"] for event in run.of_kind("member_left")] == [3]
    (recovery,) = run.of_kind("recovery")
    assert 0.0 <= recovery["pause_ms"] < 10_000.0
    assert house("audit", f"runs/clock-{seconds}").code == 0
