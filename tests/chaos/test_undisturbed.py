"""Nothing happens to these runs: what a user sees of one, and the same bits on any number of workers."""

import json
import math

import pytest
from safetensors.numpy import load_file

from tests.chaos.house import GLOBAL_BATCH, RANKS, STEPS, House, Run
from tests.chaos.scraper import names, value

pytestmark = pytest.mark.timeout(300)
SLOTS = {"0", "1"}


def test_a_clean_run_says_so(house: House, reference: Run) -> None:
    assert reference.ended is not None
    said = reference.ended.out
    assert f"step {STEPS - 1} of {STEPS}" in said
    assert f"run ended: done: {STEPS} steps; 0 faults\n" in said
    assert "done: weights in runs/reference/weights/model.safetensors" in said
    assert reference.end["state"] == "done"
    assert reference.end["faults"] == 0
    kinds = {event["kind"] for event in reference.events}
    assert kinds == {"checkpoint", "member_joined", "plan", "run_ended"}
    assert house("audit", "runs/reference").code == 0


def test_every_micro_batch_is_computed_once_and_every_shard_held_twice(reference: Run) -> None:
    status = reference.status
    assert status["micro_batches_computed"] == STEPS * GLOBAL_BATCH
    assert status["micro_batches_recomputed"] == 0
    held = [member["optimizer_bytes"] for member in status["members"]]
    one_copy = 3 * 4 * parameters(reference)  # master parameters and two moments
    assert 2.0 * one_copy <= sum(held) <= 2.1 * one_copy
    assert max(held) <= 1.5 * min(held)


def test_status_of_a_run_that_has_ended(house: House, reference: Run) -> None:
    answer = house("status", "runs/reference", "--json")
    assert answer.code == 0, answer.said()
    assert json.loads(answer.out) == {
        "state": "done",
        "step": STEPS,
        "steps": STEPS,
        "generation": reference.end["generation"],
        "members": [],
        "reason": f"{STEPS} steps",
    }


def test_prometheus_sees_it_run(reference: Run) -> None:
    assert set(reference.scraper.scrapes) == SLOTS
    assert reference.scraper.runs == {"small"}
    assert reference.scraper.left == []  # nobody answers any more
    computed = 0.0
    for scrapes in reference.scraper.scrapes.values():
        steps = [value(s, "everstep_step") for s in scrapes if "everstep_step" in names(s)]
        assert steps == sorted(steps)
        last = [s for s in scrapes if 1 <= s.get(("everstep_step", frozenset()), 0.0) < STEPS][-1]
        assert names(last) >= {
            f"everstep_{name}" for name in ("tokens_per_second", "generation", "shards_without_backup")
        }
        assert 0 < value(last, "everstep_loss") < 2 * math.log(320)
        assert value(last, "everstep_grad_norm") > 0
        assert 0 < value(last, "everstep_learning_rate") <= 2e-3
        assert value(last, "everstep_step_seconds") > 0
        phases = {p: value(last, "everstep_step_phase_seconds", phase=p) for p in ("compute", "reduce", "publish")}
        assert all(0 <= seconds <= value(last, "everstep_step_seconds") for seconds in phases.values())
        assert value(last, "everstep_workers") == 4
        assert value(last, "everstep_node_workers") == 2
        assert value(last, "everstep_shards_without_backup") == 0
        assert value(last, "everstep_pause_seconds_total") == 0
        assert not {name for name in names(last) if name.startswith("everstep_faults")}
        computed += sum(v for (name, _), v in last.items() if name == "everstep_worker_micro_batches_total")
    assert 0 < computed <= STEPS * GLOBAL_BATCH


def test_links_stay(reference: Run) -> None:
    assert len(reference.sockets.ends) == 6  # all pairs of four
    assert {len(ends) for ends in reference.sockets.ends.values()} == {1}


@pytest.mark.parametrize(("nodes", "workers"), [(1, 1), (1, 3), (2, 4)])
def test_the_same_bits_on_any_number_of_workers(house: House, reference: Run, nodes: int, workers: int) -> None:
    name = f"on-{nodes * workers}"
    run = house.train(name, cluster__nodes=nodes, cluster__workers_per_node=workers)
    assert {record.workers for record in run.records} == {nodes * workers}
    house.same(reference, run)
    assert run.end["computed"] == STEPS * GLOBAL_BATCH
    assert nodes * workers <= RANKS


def parameters(run: Run) -> int:
    return sum(tensor.size for tensor in load_file(run.directory.weights).values())
