"""A worker becomes slow in mid-run: its work moves to the others, and the bits stay."""

from __future__ import annotations

import pytest

from tests.chaos.house import GLOBAL_BATCH, STEPS, House, Run

pytestmark = pytest.mark.timeout(300)
SLOW = 3
PADDED_SECONDS = 0.06  # so that who is slow shows, whatever else runs on this machine


def test_work_leaves_a_slow_worker(house: House, reference: Run) -> None:
    run = house.train(
        "slow",
        faults=[{"at_step": 2, "fault": f"slow-worker={SLOW},factor=5", "wait": False}],
        train__pad_micro_batch_seconds=PADDED_SECONDS,
        balance={"every": 4, "patience_seconds": 0.5},
    )
    house.same(reference, run)
    first = run.of_kind("rebalance")[0]
    assert first["to"][str(SLOW)] < first["from"][str(SLOW)]
    assert first["slowness"][str(SLOW)] > 2.0
    assert first["predicted_seconds"] < 0.85 * first["step_seconds"]
    assert [e["reason"] for e in run.of_kind("plan")][:2] == ["start", "rebalance"]
    assert run.of_kind("rebalance_gain")
    assert not run.of_kind("recovery")
    assert (run.end["computed"], run.end["recomputed"]) == (STEPS * GLOBAL_BATCH, 0)
    assert run.ended is not None
    assert f"worker {SLOW} (" in run.ended.out
    assert house("audit", "runs/slow").code == 0
    scrapes = [scrape for of_slot in run.scraper.scrapes.values() for scrape in of_slot]
    samples = {key: value for scrape in scrapes for key, value in scrape.items()}
    assert samples["everstep_rebalances_total", frozenset()] >= 1
    took = {dict(labels)["worker"] for name, labels in samples if name == "everstep_worker_micro_batch_seconds"}
    assert took == {"0", "1", "2", "3"}
