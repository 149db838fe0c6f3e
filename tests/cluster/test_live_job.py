"""The job process, the controller and the agents on a real Ray, with real workers and real kills.

Each test starts a Ray of its own through the job process, never touches another, and checks that nothing is left.
"""

import json
import signal
import subprocess
import sys
import time

import pytest
from live_job import Site, eventually

pytestmark = pytest.mark.timeout(300)
ENDLESS = "train.steps=100000"


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
