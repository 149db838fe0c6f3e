"""Workers, agents, nodes and the controller are killed while the job runs, and it ends with the reference's bits.

Which step and which target is drawn from a seed: EVERSTEP_CHAOS_SEED=N chooses another.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest

from tests.chaos.house import GLOBAL_BATCH, RANKS, STEPS, House, Run

pytestmark = pytest.mark.timeout(600)
SEED = int(os.environ.get("EVERSTEP_CHAOS_SEED", "1"))
PER_RANK = GLOBAL_BATCH // RANKS  # micro-batches


def fault(at_step: int, what: str, wait: bool = True) -> dict[str, Any]:
    return {"at_step": at_step, "fault": what, "wait": wait}


def test_shrinking_and_growing(house: House, reference: Run) -> None:
    """A worker, the controller, a node; then a node joins. Also one fault whose target never was."""
    draw = random.Random(f"{SEED}/grow")
    worker, node = draw.randrange(4), draw.randrange(2)
    faults = [
        fault(draw.randint(2, 4), f"kill-worker={worker}", wait=False),
        fault(draw.randint(6, 8), "kill-controller"),
        fault(draw.randint(10, 12), f"kill-node={node}"),
        fault(draw.randint(13, 15), "kill-worker=99"),
        fault(draw.randint(16, 20), "add-node"),
    ]
    run = train(house, "grow", faults)
    house.same(reference, run)
    check_faults(run, faults)
    assert [e["fault"] for e in run.of_kind("fault_skipped")] == ["kill-worker=99"]
    shrunk, halved = run.of_kind("recovery")
    assert shrunk["workers"] == [worker]
    assert (shrunk["bytes_moved"], shrunk["links_opened"], shrunk["links_closed"]) == (0, 0, 3)
    assert len(halved["workers"]) == 2
    assert halved["bytes_moved"] == 0  # backups are on the other node
    check_work(house, run)


def test_a_standby_an_agent_and_a_controller_with_a_worker(house: House, reference: Run) -> None:
    draw = random.Random(f"{SEED}/standby")
    worker, node = draw.randrange(4), draw.randrange(2)
    late = draw.randint(14, 20)
    # Workers 0 to 3 and standby 4 were first, 5 replaces the one that was killed: the survivor on the other node stays.
    stays = next(w for w in (0, 1, 2, 3) if w != worker and w // 2 != node)
    faults = [
        fault(draw.randint(2, 6), f"kill-worker={worker}"),
        fault(draw.randint(8, 12), f"kill-agent={node}"),
        fault(late, f"kill-worker={stays}", wait=False),
        fault(late, "kill-controller"),
    ]
    run = train(house, "standby", faults, cluster__standbys=1)
    house.same(reference, run)
    check_faults(run, faults)
    assert not run.of_kind("fault_skipped")
    first, second, third = run.of_kind("recovery")
    assert first["workers"] == [worker]
    joined = [e for e in run.of_kind("member_joined") if e["worker"] == 4]
    plans = [e for e in run.of_kind("plan") if 4 in e["members"]]
    assert joined[0]["generation"] == plans[0]["generation"] == 2  # the standby took the place in the first ballot
    assert worker not in plans[0]["members"]
    joins = [e for e in run.of_kind("member_joined") if e["time"] < second["time"] and e["node"] == node]
    assert set(second["workers"]) >= {e["worker"] for e in joins} - {worker}
    assert third["workers"] == [stays]
    check_work(house, run)


def test_all_die_at_once(house: House, reference: Run) -> None:
    """Every holder of every shard is gone, so the job goes back to its newest checkpoint and replays."""
    draw = random.Random(f"{SEED}/all")
    at = draw.randint(9, 14)
    faults = [fault(at, "kill-worker=0", wait=False), fault(at, "kill-worker=1")]
    run = train(house, "all", faults, cluster__workers_per_node=1, checkpoint__full_every=4)
    house.same(reference, run)
    check_faults(run, faults)
    (recovery,) = run.of_kind("recovery")
    assert recovery["rollback"]
    (plan,) = [e for e in run.of_kind("plan") if e["rollback"]]
    checkpoint = plan["step"]
    assert checkpoint in (4 * (at // 4), 4 * (at // 4) - 4)  # it is written in the background, so the last may be lost
    assert checkpoint in [e["version"] for e in run.of_kind("checkpoint") if e["time"] < plan["time"]]
    assert recovery["recomputed"] == (at - checkpoint) * GLOBAL_BATCH
    assert run.end["computed"] == STEPS * GLOBAL_BATCH + recovery["recomputed"]
    times = house.computed()
    replayed = {n for n, count in times.items() if count > 1} - {0}
    assert replayed == set(range(checkpoint * GLOBAL_BATCH, at * GLOBAL_BATCH)) - {0}


# --- what holds after any of them ------------------------------------------------------------------------------


def train(house: House, name: str, faults: list[dict[str, Any]], **settings: Any) -> Run:
    house.trace.unlink(missing_ok=True)
    print(f"EVERSTEP_CHAOS_SEED={SEED}", faults)
    own = {"recipe": "counting:Counting", "model.vocab_size": house.vocab_size}
    return house.train(name, faults=faults, **own, **settings)


def check_faults(run: Run, faults: list[dict[str, Any]]) -> None:
    """Each was recorded once and in its place, before anything came of it."""
    recorded = [e for e in run.events if e["kind"] in ("fault_injected", "fault_skipped")]
    assert [(e["index"], e["fault"]) for e in recorded] == [(n, f["fault"]) for n, f in enumerate(faults)]
    for event, given in zip(recorded, faults, strict=True):
        if given["wait"]:
            assert event["step"] == given["at_step"]
        else:
            assert event["step"] >= given["at_step"]
    kinds = [e["kind"] for e in run.events]
    for kind in ("fault_detected", "member_left", "recovery"):
        assert kind not in kinds[: kinds.index("fault_injected")]
    members = {e["worker"] for e in run.of_kind("member_joined")}  # standbys may die with their node
    lost = [e["worker"] for e in run.of_kind("member_left")]
    assert Counter(lost) == Counter(w for e in run.of_kind("recovery") for w in e["workers"] if w in members)
    assert [e["state"] for e in run.of_kind("run_ended")] == ["done"]
    assert all(e["detect_ms"] is None or e["detect_ms"] >= 0 for e in run.of_kind("recovery"))
    detected = [e["worker"] for e in run.of_kind("fault_detected")]
    assert {w for e in run.of_kind("recovery") for w in e["workers"] if w in members} <= set(detected)
    assert len(detected) == run.end["faults"]
    pairs = run.sockets.ends
    assert {len(ends) for ends in pairs.values()} == {1}, pairs  # nobody's link was ever opened again


def check_work(house: House, run: Run) -> None:
    """Nothing was computed again but what the dead owed, by an independent count."""
    times = house.computed()
    assert len(times) == STEPS * GLOBAL_BATCH
    again = Counter({n: count - 1 for n, count in times.items() if count > 1 and n > 0})
    owed = 0
    members = 0
    for event in run.events:
        if event["kind"] == "plan":
            members = len(event["members"])
        elif event["kind"] == "member_left":
            owed += -(-RANKS // members) * PER_RANK
    assert sum(again.values()) <= owed
    assert run.end["recomputed"] <= owed
    steps = {n // GLOBAL_BATCH for n in again}
    assert steps <= {e["step"] for e in run.of_kind("plan")}, (steps, again)
    assert run.end["computed"] == STEPS * GLOBAL_BATCH + run.end["recomputed"]
