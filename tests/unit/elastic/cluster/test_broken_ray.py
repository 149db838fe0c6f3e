"""A local Ray of which a process has died; stand-ins for Ray's own."""

import subprocess
import time

import psutil

from elastic.cluster.engine import Engine


def test_a_dead_process_is_named_and_the_rest_is_killed() -> None:
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        engine = Engine("1.2.3.4:5", "x", True, None, tuple(psutil.Process(s.pid) for s in sleepers))
        assert engine.broken() == ""
        sleepers[1].kill()
        deadline = time.monotonic() + 10
        while not engine.broken() and time.monotonic() < deadline:  # a zombie: nobody has waited for it
            time.sleep(0.01)
        assert engine.broken() == "gcs_server"
        sleepers[1].wait()
        assert engine.broken() == "gcs_server"
        engine.kill()
        assert sleepers[0].wait(timeout=10) == -9
        assert engine.broken() == "raylet"
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def test_a_cluster_that_is_not_ours_is_not_watched() -> None:
    assert Engine("1.2.3.4:5", "x", False, None).broken() == ""
