"""Bad data, wrong gradients and changed memory on real processes: each is found, and what it touched is right."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.chaos.house import GLOBAL_BATCH, STEPS, House, Run

pytestmark = pytest.mark.timeout(600)
POISONED = 6


@pytest.fixture(scope="module")
def poisoned(house: House) -> Run:
    """The data of one step give NaN; while it is computed again, a worker dies."""
    faults = [{"at_step": POISONED, "fault": "poison,what=nan"}, {"at_step": POISONED, "fault": "kill-worker=1"}]
    return house.train("poisoned", faults=faults)


def test_a_poisoned_step_is_computed_again_and_skipped(house: House, poisoned: Run, reference: Run) -> None:
    records = poisoned.records
    assert [r.step for r in records] == list(range(STEPS))
    assert [r.step for r in records if r.verdict == "skip"] == [POISONED]
    assert records[POISONED].reason == "the gradient's norm is nan"
    assert math.isnan(records[POISONED].grad_norm)
    assert records[POISONED].digest == records[POISONED - 1].digest  # nothing of it was applied
    assert [r.digest for r in records[:POISONED]] == [r.digest for r in reference.records[:POISONED]]
    told = outcomes(poisoned)
    assert told[0] == (POISONED, 1, "computed again"), poisoned.story()
    assert told[-1] == (POISONED, 2, "skipped"), poisoned.story()
    assert [e["worker"] for e in poisoned.of_kind("member_left")] == [1]  # nobody is blamed for the data
    assert house("audit", "runs/poisoned").code == 0


def test_a_job_may_stop_there_and_go_on_by_skipping(house: House, poisoned: Run) -> None:
    faults = [{"at_step": POISONED, "fault": "poison,what=nan"}]
    command, run = house.begin("halted", faults=faults, guard__on_bad_data="stop")
    ended = command.wait()
    assert ended.code == 3, f"{ended.said()}\n{run.story()}"
    samples = f"samples [{POISONED * GLOBAL_BATCH}, {(POISONED + 1) * GLOBAL_BATCH})"
    for part in (f"step {POISONED} is bad", "the gradient's norm is nan", samples, "loss 5.", "go on with --resume"):
        assert part in ended.out + ended.err, ended.said()
    house.eye.nothing_left()
    assert run.of_kind("checkpoint")[-1]["version"] == len(run.records) == POISONED

    ended = house(*house.run_arguments("halted", resume=True, faults=faults, guard__on_bad_data="skip"))
    assert ended.code == 0, f"{ended.said()}\n{run.story()}"
    house.eye.nothing_left()
    house.same(poisoned, run)


def test_wrong_bits_are_found_and_their_worker_leaves(house: House, reference: Run) -> None:
    """A bit of one worker's gradient, later one of another's parameters: the final bits are the reference's."""
    faults = [
        {"at_step": 5, "fault": "corrupt-worker=2,what=gradient"},
        {"at_step": 12, "fault": "corrupt-worker=0,what=parameter"},
    ]
    run = house.train("corrupted", faults=faults)
    house.same(reference, run)
    left = {e["worker"]: e["reason"] for e in run.of_kind("member_left")}
    assert left.keys() == {0, 2}, run.story()
    assert left[2].startswith("its gradient of rank ")
    assert left[2].endswith("could not be reproduced")
    assert "are not those that were published" in left[0]
    told = outcomes(run)
    step = told[0][0]
    assert step >= 5
    assert told == [(step, 1, "computed again"), (step, 2, "computed again"), (step, 3, "reproduced")], run.story()
    assert all(r.verdict == "commit" for r in run.records)


def outcomes(run: Run) -> list[tuple[Any, ...]]:
    return [(e["step"], e["attempt"], e["outcome"]) for e in run.of_kind("bad_step")]
