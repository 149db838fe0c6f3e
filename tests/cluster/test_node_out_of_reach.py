"""A node whose agent and workers reach nobody for a while: the others go on, that one waits, and comes back."""

from __future__ import annotations

import signal

import pytest
from live_job import Site, assert_same_as_alone, eventually

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
SLOW_STEPS = ("data.seq_len=256", "train.global_batch=16", "train.steps=100000")


def test_a_node_out_of_reach(site: Site) -> None:
    cut = 'faults=[{"at_step": 4, "fault": "partition-node=1,seconds=8"}]'
    job = site.job("cut", *SLOW_STEPS, cut)
    injected = job.wait_for_event("fault_injected", within_seconds=120)["time"]
    lone = next(m["pid"] for m in job.members() if m["node"] == 1)
    left = job.wait_for_event("member_left")
    print(f"goes on after {left['time'] - injected:.1f} s")
    assert (left["worker"], left["reason"]) == (1, "all others lost their links to it")
    step = job.step()
    eventually(lambda: job.step() > step + 2, 60, job.story)
    assert "the workers of this node wait" in (job.run.logs / "agent-1.log").read_text()
    assert lone in site.living()  # nobody can reach it
    assert [m["node"] for m in job.members()] == [0]

    eventually(lambda: [m["node"] for m in job.members()] == [0, 2], 90, job.story)
    joined = job.events("member_joined")[-1]
    print(f"whole again after {joined['time'] - injected:.1f} s")
    job.wait_for_step(joined["step"] + 5)
    assert lone not in site.living()
    job.signal(signal.SIGINT)
    assert job.end(60) in (0, 130)
    site.assert_nothing_is_left(15)
    assert not any(event["rollback"] for event in job.events("plan"))
    assert_same_as_alone(site, job, SLOW_STEPS, joined["step"] + 3)
