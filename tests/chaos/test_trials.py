"""`everstep chaos` and `everstep replay` from end to end: on real processes, with a breach that is planted."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.chaos.house import STEPS, House, Run

pytestmark = pytest.mark.timeout(900)

FAULTS = """\
- {at_step: 5, fault: kill-worker=1, wait: true}
- {at_step: 10, fault: kill-controller, wait: true}
- {at_step: 14, fault: kill-node=1, wait: true}
- {at_seconds: 0, fault: kill-worker=17}
"""
PATIENCE_SECONDS = 800.0  # for two runs, one after the other
NO_END = ("--set", "train.steps=100000")


def test_a_schedule_from_a_file(house: House, reference: Run) -> None:
    (house.folder / "faults.yaml").write_text(FAULTS)
    ended = house("chaos", "job.yaml", "--minutes", "10", "--faults", "faults.yaml", "--reference", str(reference.path))
    run = house.at("small-chaos-faults")
    assert ended.code == 0, f"{ended.said()}\n{run.story()}"
    house.eye.nothing_left()
    report = json.loads((run.path / "chaos.json").read_bytes())
    assert report["verdict"] == "kept"
    assert report["ended_early"] is True  # 24 steps are over within 10 minutes, and it says so
    assert "raise train.steps" in ended.out
    assert [f["fault"] for f in report["faults"]] == ["kill-worker=1", "kill-controller", "kill-node=1"]
    assert all(f["detected"] for f in report["faults"][:2])
    assert report["not_injected"] == ["kill-worker=17 at 0.0 s: kill-worker=17: skipped, worker 17 is not there"]
    assert report["steps"] == STEPS
    last = ended.out.splitlines()[-1]
    assert last == "kept: 3 faults in 24 steps, and every promise held; the job ended before its schedule"


@pytest.mark.slow
def test_drawn_faults_and_a_breach(house: House, reference: Run) -> None:
    """One digit of one digest of the reference is another: found, said, exit code 1."""
    forged = house.folder / "runs" / "forged"
    shutil.copytree(reference.path, forged)
    lines = (forged / "ledger.jsonl").read_text().splitlines(keepends=True)
    digest = json.loads(lines[1])["digest"]
    lines[1] = lines[1].replace(digest, digest[:-1] + ("0" if digest[-1] != "0" else "1"))
    (forged / "ledger.jsonl").write_text("".join(lines))
    one_node = ("--set", "cluster.nodes=1")
    ended = house(
        "chaos",
        "job.yaml",
        "--minutes",
        "0.02",
        "--mtbf",
        "0.1",
        "--seed",
        "4",
        "--reference",
        str(forged),
        *one_node,
        seconds=PATIENCE_SECONDS,
    )
    run = house.at("small-chaos-4")
    assert ended.code == 1, f"{ended.said()}\n{run.story()}"
    house.eye.nothing_left()
    assert "BROKEN" in ended.out
    assert f"step 1 differs in digest: {digest} here" in " ".join(ended.out.split())
    assert ended.out.splitlines()[-1].endswith(": P1 same bits; see runs/small-chaos-4")
    report = json.loads((run.path / "chaos.json").read_bytes())
    assert [p["name"] for p in report["promises"] if not p["kept"]] == ["P1 same bits"]


def test_a_trace_with_no_node_for_a_while(house: House) -> None:
    trace = {"gap_seconds": 300, "ticks": 6, "capacity": 16, "changes": [[0, 16], [1, 0], [5, 8]]}
    (house.folder / "trace.json").write_text(json.dumps(trace))
    sets = (*NO_END, "--set", "checkpoint.full_every=3", "--set", "cluster.workers_per_node=1")
    ended = house("replay", "trace.json", "job.yaml", "--tick", "1", "--nodes", "2", *sets, seconds=PATIENCE_SECONDS)
    run = house.at("small-replay-trace")
    assert ended.code == 0, f"{ended.said()}\n{run.story()}"
    house.eye.nothing_left()
    report = json.loads((run.path / "replay.json").read_bytes())
    assert (report["verdict"], report["first_nodes"], report["times_none"]) == ("kept", 2, 1)
    assert report["rollbacks"] >= 1
    kinds = [e["fault"].split("=")[0] for e in run.of_kind("fault_injected")]
    assert kinds[:3] == ["kill-node", "kill-node", "add-node"]
    back = next(e for e in run.of_kind("plan") if e["rollback"])
    assert back["step"] % 3 == 0  # from a checkpoint, not from the beginning if there was one
    assert report["ideal"]["node_seconds"] == pytest.approx(2 + 0 + 1)
    assert ended.out.splitlines()[-1].startswith("kept: ")
