"""The job process, the controller and the agents on a real Ray, with real workers and real kills.

Each test starts a Ray of its own through the job process, never touches another, and checks that nothing is left.
"""

import json
import signal
import socket
import subprocess
import sys
import time

import pytest
from live_job import Site, eventually, scrape

from dataloader.errors import UsageError
from elastic.cluster.attach import inject

pytestmark = pytest.mark.timeout(300)
ENDLESS = "train.steps=100000"


def test_faults_a_stop_and_a_resumed_run(site: Site) -> None:
    job = site.job("run", ENDLESS)
    job.wait_for_step(5)
    assert [m["id"] for m in job.members()] == [0, 1]
    metrics = scrape(job.targets()[0])
    assert metrics["everstep_workers"] == 2
    assert metrics["everstep_step"] > 0

    assert inject(job.run.path, ["kill-worker=1", "kill-worker=99"]) == [
        "kill-worker=1: injected",
        "kill-worker=99: skipped, worker 99 is not there",
    ]
    recovery = job.wait_for_event("recovery")
    assert 0 < recovery["detect_ms"] < 2000
    job.wait_until_settled(0, 1)  # with the replacement

    assert inject(job.run.path, ["kill-controller"]) == ["kill-controller: injected"]
    eventually(lambda: job.status().get("incarnation") == 2, 60, job.story)
    job.wait_for_step(job.step() + 5)

    assert inject(job.run.path, ["kill-agent=1"]) == ["kill-agent=1: injected"]
    job.wait_until_settled(0, 2)

    assert inject(job.run.path, ["kill-node=0", "add-node"]) == ["kill-node=0: injected", "add-node: injected"]
    job.wait_until_settled(2, 3)
    eventually(lambda: len(job.targets()) == 2, 10, job.story)
    counted = scrape(job.targets()[-1])
    assert counted['everstep_faults_injected_total{kind="kill-worker"}'] == 1
    assert counted["everstep_pauses_total"] >= 3
    assert not any('worker="1"' in name for name in counted)

    job.signal(signal.SIGTERM)
    assert job.end() == 130
    stopped = job.step()
    assert job.events()[-1]["kind"] == "run_ended"
    assert job.events()[-1]["state"] == job.status()["state"] == "stopped"
    assert [r.step for r in job.ledger()] == list(range(stopped))
    assert (job.run.checkpoints / f"v{stopped:08d}" / "manifest.json").exists()
    site.assert_nothing_is_left(10)
    with pytest.raises(UsageError, match="no job is running here"):
        inject(job.run.path, ["stop"])

    job.run.job.write_text(job.run.job.read_text().replace("steps: 100000", f"steps: {stopped + 10}"))
    again = site.job("run", f"train.steps={stopped + 10}", "cluster.nodes=1", resume=True)
    assert again.end(90) == 0
    assert [r.step for r in again.ledger()] == list(range(stopped + 10))
    assert min(m["worker"] for m in again.events("member_joined")) > 3  # numbers are never used again
    assert again.run.weights.exists()
    site.assert_nothing_is_left(10)


def test_a_killed_job_process_leaves_nothing(site: Site) -> None:
    job = site.job("run", ENDLESS)
    job.wait_for_step(3)
    assert len(site.living()) > 5
    job.signal(signal.SIGKILL)
    job.process.wait()
    # Ray's own directory stays, for the next job to sweep; no process does.
    eventually(lambda: not site.living(), 15, lambda: str(site.living()))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = site.job("next", f"metrics.port={port}", "cluster.nodes=1")
        assert refused.end(90) == 3
    assert refused.last_line().startswith(f"everstep: metrics.port: {port} is taken on this machine")
    assert refused.events()[-1]["state"] == "failed"
    assert "metrics.port" in refused.events()[-1]["reason"]
    site.assert_nothing_is_left(10)


HOST = """
import sys, json
from elastic.cluster.engine import local_ray
with local_ray("somebody-elses", 64) as engine:
    print(json.dumps(engine.contact()), flush=True)
    sys.stdin.readline()
"""
LOOK = """
import json, sys
from elastic.cluster.engine import connected_ray
with connected_ray(sys.argv[1], "looking", sys.argv[2]):
    import ray
    from ray.util.placement_group import placement_group_table
    groups = [g["name"] for g in placement_group_table().values() if g["state"] != "REMOVED"]
    print(json.dumps([ray.util.list_named_actors(all_namespaces=True), groups]))
"""


def test_a_cluster_that_was_there_before_is_left_as_it_was(site: Site) -> None:
    host = site.popen([sys.executable, "-c", HOST], {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        contact = json.loads(host.stdout.readline())
        address, token = contact["address"], contact["token_path"]
        before = set(site.living())

        def there() -> list[list[object]]:
            look = [sys.executable, "-c", LOOK, address, token]
            said = subprocess.run(look, capture_output=True, text=True, timeout=60, check=True).stdout
            value: list[list[object]] = json.loads(said.strip().splitlines()[-1])
            return value

        env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token}
        impatient = site.job("impatient", ENDLESS, "cluster.nodes=1", address=address, **env)
        impatient.wait_for_step(2)
        actors, groups = there()
        assert len(actors) == 2
        assert len(groups) == 1
        impatient.signal(signal.SIGINT)
        impatient.signal(signal.SIGTERM)  # not the same one twice: the kernel keeps but one
        begun = time.monotonic()
        assert impatient.end(20) == 130
        assert time.monotonic() - begun < 15
        assert impatient.events()[-1]["reason"].startswith("ended at once")
        assert there() == [[], []]

        killed = site.job("killed", ENDLESS, "cluster.nodes=1", address=address, **env)
        killed.wait_for_step(2)
        killed.signal(signal.SIGKILL)
        killed.process.wait()
        eventually(lambda: there() == [[], []], 30, lambda: str(site.living()))
        # Ray may keep an idle process of its own for a while; nobody trains.
        eventually(
            lambda: not any("runtime.worker" in c for c in site.living().values()), 10, lambda: str(site.living())
        )
        assert before <= set(site.living())
    finally:
        host.communicate("\n", timeout=30)
    site.assert_nothing_is_left(15)
