"""A job on a Ray cluster of several hosts, as far as Ray knows: one raylet is killed, another comes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_job import Site, assert_same_as_alone, eventually

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
SLOW_STEPS = ("data.seq_len=256", "train.global_batch=16", "train.steps=100000", "metrics.port=0")
NOTICE_SECONDS = 8.0  # Ray itself takes some 14


@pytest.fixture
def tell(site: Site) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Talks to a cluster of its own (many_raylets.py)."""
    with tempfile.TemporaryDirectory(prefix="everstep-t-", dir="/tmp") as directory:
        program = [sys.executable, str(Path(__file__).with_name("many_raylets.py")), "2", directory]
        process = site.popen(program, {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def tell(line: str) -> dict[str, Any]:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            while not (said := process.stdout.readline()).startswith("{"):
                assert said, f"the cluster has ended before it answered {line!r}"
            answer: dict[str, Any] = json.loads(said)
            return answer

        try:
            yield tell
        finally:
            process.stdin.close()
            process.stdout.close()
            process.wait(30)


def test_a_killed_raylet_and_a_new_one(site: Site, tell: Callable[[str], dict[str, Any]]) -> None:
    started = tell("start 2")
    address = started["address"]
    job = site.job("hosts", *SLOW_STEPS, address=address)
    job.wait_until_settled(0, 1, within_seconds=120)
    job.wait_for_step(5)
    controller = next(psutil.Process(pid) for pid, what in site.living().items() if "ControllerActor" in what)
    other = next(pid for pid in started["raylets"] if pid != controller.ppid())  # job and controller share a host
    killed = tell(f"kill {other}")["time"]
    left = job.wait_for_event("member_left")
    print(f"member_left {left['time'] - killed:.2f} s after the kill: {left}")
    job.wait_for_event("recovery")
    eventually(lambda: len(job.members()) == 1, 30, job.story)
    assert left["time"] - killed < NOTICE_SECONDS
    step = job.step()
    job.wait_for_step(step + 10)

    tell("add")
    eventually(lambda: len(job.members()) == 2, 90, job.story)
    joined = job.events("member_joined")[-1]
    job.wait_for_step(joined["step"] + 5)
    assert not any(event["rollback"] for event in job.events("plan"))
    job.signal(signal.SIGINT)
    assert job.end(60) in (0, 130)

    assert_same_as_alone(site, job, SLOW_STEPS, joined["step"] + 3)
